"""Plans: what comes out of a checkpoint, computed on metadata alone."""

from orbaxkit.planning.nodes import Element as Element
from orbaxkit.planning.nodes import Expr as Expr
from orbaxkit.planning.nodes import fold as fold
from orbaxkit.planning.plan import Output as Output
from orbaxkit.planning.plan import Plan as Plan
from orbaxkit.planning.plan import Transform as Transform
from orbaxkit.planning.plan import make_plan as make_plan
from orbaxkit.planning.scanned import find_scanned as find_scanned
