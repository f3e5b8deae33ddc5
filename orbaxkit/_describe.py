"""What a tree is made of: recognised from its specs, and from the few numbers that optimizers count with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from orbaxkit.errors import shorten, shown
from orbaxkit.formats import Source
from orbaxkit.optimizer.inference import Guess
from orbaxkit.optimizer.observing import averages_of, observe
from orbaxkit.optimizer.stored import find_states, find_step, stored_state
from orbaxkit.paths import format_path
from orbaxkit.planning.scanned import Scanned, find_scanned
from orbaxkit.slots import describe_slots
from orbaxkit.specs import Specs


@dataclass(frozen=True)
class Description:
    """What was recognised in a tree.

    `scanned`: subtrees whose leaves share a layer axis, with every axis that could be it; `unstack` infers it where
    only one could. `optimizer`: a phrase for each optimizer state. `states`: what each node of the optimizer states was
    taken for, how sure that is, and what else it could be. `counts`: their values. `frozen`: params without moments.
    `averages`: where averaged (EMA) params are. `oddities`: what looks wrong. `notes`: how it was saved, what had to be
    assumed.
    """

    scanned: tuple[Scanned, ...] = ()
    optimizer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    states: tuple[Guess, ...] = ()
    counts: Mapping[str, int] | None = None
    frozen: tuple[str, ...] = ()
    averages: tuple[str, ...] = ()
    oddities: tuple[str, ...] = ()

    @property
    def ambiguous(self) -> tuple[Guess, ...]:
        """The nodes of optimizer states that `assume=` can settle."""
        return tuple(guess for guess in self.states if guess.how == "ambiguous")

    def __str__(self) -> str:
        return "\n".join(f"{label:<11}{shown(text)}" for label, text in self._rows()) or "nothing was recognised"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield from (("scanned", str(found)) for found in self.scanned)
        yield from (("optimizer", phrase) for phrase in self.optimizer)
        yield from (("count", f"{name} = {value:,}") for name, value in (self.counts or {}).items())
        yield from (("ambiguous", text) for text in shorten(map(str, self.ambiguous)))
        if self.frozen:
            yield "frozen", f"no moments for {len(self.frozen):,}: {', '.join(shorten(self.frozen))}"
        yield from (("average", f"{path}: averaged (EMA) params") for path in self.averages)
        yield from (("odd", text) for text in shorten(self.oddities, 20))
        yield from (("note", note) for note in self.notes)


def describe(specs: Specs, notes: tuple[str, ...], source: Source, *, values: bool = False) -> Description:
    """Recognise scanned subtrees and optimizer states; without `values`, counts are the only arrays that are read."""
    step = find_step(specs)
    observed = [observe(stored_state(specs, format_path(root)), source, step, values) for root in find_states(specs)]
    return Description(
        tuple(find_scanned(specs)),
        tuple(describe_slots(specs)),
        notes,
        states=tuple(guess for one in observed for guess in one.guesses),
        counts={name: count for one in observed for name, count in one.counts.items()},
        frozen=tuple(name for one in observed for name in one.frozen),
        averages=tuple(averages_of(specs)),
        oddities=tuple(text for one in observed for text in one.oddities),
    )
