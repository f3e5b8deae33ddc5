"""Transforms: plain values that turn a plan into another one."""

from orbaxkit.transforms.chaining import chain as chain
from orbaxkit.transforms.choosing import drop as drop
from orbaxkit.transforms.choosing import select as select
from orbaxkit.transforms.copies import unreplicate as unreplicate
from orbaxkit.transforms.filling import fill as fill
from orbaxkit.transforms.joining import concat as concat
from orbaxkit.transforms.joining import split as split
from orbaxkit.transforms.layers import stack as stack
from orbaxkit.transforms.layers import unstack as unstack
from orbaxkit.transforms.layout import reshape as reshape
from orbaxkit.transforms.layout import transpose as transpose
from orbaxkit.transforms.lora import merge_lora as merge_lora
from orbaxkit.transforms.naming import rename as rename
from orbaxkit.transforms.reading import from_json as from_json
from orbaxkit.transforms.rows import place_rows as place_rows
from orbaxkit.transforms.values import affine as affine
from orbaxkit.transforms.values import cast as cast
