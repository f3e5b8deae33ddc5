"""What a tree is made of, from its specs alone."""

from dataclasses import dataclass

from orbaxkit.planning.scanned import Scanned, find_scanned
from orbaxkit.slots import describe_slots
from orbaxkit.specs import Specs


@dataclass(frozen=True)
class Description:
    """What was recognised in a tree.

    `scanned`: subtrees whose leaves share a layer axis, with every axis that could be it; `unstack` infers it where
    only one could. `optimizer`: a phrase for each optimizer state. `notes`: how it was saved, what had to be assumed.
    """

    scanned: tuple[Scanned, ...]
    optimizer: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("scanned", str(found)) for found in self.scanned]
        rows += [("optimizer", phrase) for phrase in self.optimizer]
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{label:<11}{text}" for label, text in rows) or "nothing was recognised"


def describe(specs: Specs, notes: tuple[str, ...]) -> Description:
    """Recognise scanned subtrees and optimizer states; no array byte is read."""
    return Description(tuple(find_scanned(specs)), tuple(describe_slots(specs)), notes)
