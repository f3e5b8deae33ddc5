"""Recipes: conversions between two worlds that people know by name, as rows of data."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from orbaxkit.errors import TransformError
from orbaxkit.recipes.bert import bert, bert_hf
from orbaxkit.recipes.openpi import openpi
from orbaxkit.recipes.perceiver import perceiver
from orbaxkit.recipes.praxis import praxis
from orbaxkit.recipes.rows import Recipe as Recipe

RECIPES: Mapping[str, Callable[..., Recipe]] = {
    make.__name__: make for make in (bert, bert_hf, openpi, perceiver, praxis)
}


def recipe(name: str, **options: Any) -> Recipe:
    """A named conversion between two worlds, as a transform: `ok.convert(src, dst, ok.recipe("bert"))`.

    `.inverse()` goes back, `recipe[pattern]` is a part of it, and printing it shows every row. All params are mapped,
    or it is an error that names them; optimizer slots follow, and what is neither stays where it is.

    `bert`: TensorFlow's variables and Adam's slots <-> nested Flax names and an optax state. `bert_hf`: TensorFlow's
    variables <-> the torch tensors of transformers. `openpi`: pi0's and pi0.5's JAX params <-> those of openpi's
    PyTorch port; options `lora="merge"` or `"keep"`, `lora_scale`, and on the way back `vision_heads`. `praxis`:
    Praxis' checkpoint <-> NeMo Automodel's modules. `perceiver`: DeepMind's Haiku params <-> transformers' Perceiver;
    option `conv`.

    Raises TransformError: there is no such recipe, or it has no such option.

    >>> ok.recipe("bert").inverse()
    recipe('bert').inverse()
    """
    if name not in RECIPES:
        raise TransformError(f"there is no recipe {name!r}", hint=f"one of {', '.join(RECIPES)}")
    try:
        return replace(RECIPES[name](**options), options=options)
    except TypeError as error:
        raise TransformError(f"the recipe {name} has no such option: {error}") from None
