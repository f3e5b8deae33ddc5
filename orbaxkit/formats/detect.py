"""What did the user point at? A run's root, a step, an item or a single file; and how each item is opened."""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from orbaxkit.errors import CheckpointError, shorten
from orbaxkit.formats import Source, array_metadatas, flax_msgpack, haiku_pickle, tf_bundle
from orbaxkit.formats.classify import (
    OWN_NAMES,
    V1_MARKER,
    enclosing_item,
    finished_name,
    is_array_metadatas,
    is_msgpack_map,
    is_step,
    is_tree,
    item_handlers,
    random_key_name,
    step_of,
    tree_items,
    unfinished_in_store,
)
from orbaxkit.formats.files import Folder, check_not_lfs, folder_at
from orbaxkit.formats.keys import open_random_key
from orbaxkit.formats.ocdbt import MANIFEST
from orbaxkit.formats.orbax import open_item
from orbaxkit.formats.remote import SCHEMES, is_remote, remote_path
from orbaxkit.formats.safetensors import INDEX_SUFFIX, SUFFIX, is_safetensors, open_safetensors
from orbaxkit.formats.sidecars import ARRAY_METADATAS, is_process_file
from orbaxkit.formats.tf_index import INDEX

DEFAULT_ITEM = "default"
_ITEM_FILES = {*OWN_NAMES, "checkpoint", MANIFEST}
_LOOKED_FOR = "no _METADATA, no checkpoint file, no manifest.ocdbt, no array folders and no steps are here"
_FOREIGN = {
    ".index": "a TensorFlow checkpoint",
    ".pt": "a PyTorch file",
    ".pth": "a PyTorch file",
    ".bin": "a PyTorch file",
    ".npz": "a numpy archive",
    ".h5": "an HDF5 file",
}


@dataclass(frozen=True)
class Layout:
    """Where a checkpoint's items lie. `items` are its trees, `other_items` everything else beside them.

    `is_composite`: outside a run, a tree beside JSON items; their names were chosen by whoever saved, so that even one
    tree goes by its name. In a step of a run one tree is the tree.
    """

    path: str
    format: str
    items: Mapping[str, str]
    other_items: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    step_name: str | None = None
    steps: tuple[tuple[int, str], ...] = ()
    unfinished: tuple[str, ...] = ()
    is_finished: bool = True
    is_composite: bool = False
    root: str | None = None
    writer: str | None = None
    notes: tuple[str, ...] = ()
    folder: Folder | None = field(default=None, repr=False, compare=False)  # what was opened

    def folder_at(self, path: str) -> Folder:
        """A path of this layout as a folder, with what is known of its store."""
        return Folder(path) if self.folder is None else replace(self.folder, path=path)


def locate(path: str | os.PathLike[str], step: int | None = None) -> Layout:
    """Find out what a path is. Of a root, the latest finished step is taken, or the one asked for."""
    folder = folder_at(absolute_path(path))
    kind = folder.kind()
    if (kind is None or folder.is_local) and folder.parent.has_file(f"{folder.name}{INDEX}"):
        layout = _check_step(_bundle_layout(folder.parent, folder.name), step)
    elif kind is None:
        raise _no_such(folder)
    elif kind == "folder":
        layout = _locate_folder(folder, step)
    else:
        layout = _check_step(_locate_file(folder.parent, folder.name), step)
    return replace(layout, folder=folder)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """A local path as an absolute one: `~` and `file://` are understood, links are kept. URLs of stores are checked."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"{text!r} is no path")
    text = text.removeprefix("file://")
    if is_remote(text):
        return remote_path(text)
    if "://" in text:
        known = ", ".join(SCHEMES)
        raise CheckpointError(f"{text.split('://')[0]}:// paths cannot be read", where=text, hint=f"{known} can")
    return os.path.abspath(os.path.expanduser(text))


def _no_such(folder: Folder) -> CheckpointError:
    path = folder.path
    try:
        beside = list(folder.parent.names())
    except CheckpointError:
        beside = []
    tmp = [name for name in beside if finished_name(name) == folder.name]
    if tmp:
        return CheckpointError(
            "no such file or folder, only a save that was never finished",
            where=path,
            hint=f"look into it with its full name: {folder.parent.where(tmp[0])}",
        )
    return CheckpointError("no such file or folder", where=path)


def _inside(path: str, item: Folder) -> CheckpointError:
    return CheckpointError("this is inside a checkpoint", where=path, hint=f"open {item.path}")


def _locate_file(folder: Folder, name: str) -> Layout:
    path = folder.where(name)
    prefix = tf_bundle.prefix_of(name)
    if prefix is not None and folder.has_file(f"{prefix}{INDEX}"):
        return _bundle_layout(folder, prefix)
    if prefix is not None and not name.endswith(INDEX):
        raise CheckpointError(f"the TensorFlow index {prefix}{INDEX} is missing", where=path)
    if tf_bundle.is_table_file(folder, name):
        hint = "write it again with tf.compat.v1.train.Saver, whose default is the V2 format"
        raise CheckpointError(f"{name} is a TensorFlow checkpoint in the old V1 format", where=path, hint=hint)
    inside = enclosing_item(folder.folder(name))
    if inside is not None:
        raise _inside(path, inside)
    if name.endswith(SUFFIX):
        return Layout(path, "safetensors", {DEFAULT_ITEM: path})
    if name.endswith(haiku_pickle.SUFFIXES):
        return Layout(path, "haiku_pickle", {DEFAULT_ITEM: path}, writer="Haiku")
    if name.endswith(INDEX_SUFFIX):
        return Layout(folder.path, "safetensors", {DEFAULT_ITEM: folder.path})
    foreign = _FOREIGN.get(os.path.splitext(name)[1])
    if foreign:
        raise CheckpointError(f"{name} is {foreign}, not an Orbax checkpoint", where=path)
    if is_process_file(name):
        return Layout(path, "array_metadatas", {DEFAULT_ITEM: path})
    if is_msgpack_map(folder, name):
        return _flax_layout(path, folder, name)
    with folder.open(name) as file:
        head = file.read(64)
    check_not_lfs(head, path)
    problem = "begins like no format that is known here" if head else "is empty"
    raise CheckpointError(f"{name} is no checkpoint: it {problem}", where=path)


def _bundle_layout(folder: Folder, prefix: str) -> Layout:
    steps = tf_bundle.steps_of([prefix])
    path = folder.where(prefix)
    step, root = (steps[0][0], folder.path) if steps else (None, None)
    return Layout(path, "tf_bundle", {DEFAULT_ITEM: path}, step=step, step_name=prefix if steps else None, root=root)


def _bundles_layout(folder: Folder, prefixes: list[str], step: int | None) -> Layout:
    """The only bundle of a folder, or that of a step, the latest by default."""
    steps = tf_bundle.steps_of(prefixes)
    if len(prefixes) == 1 and (step is None or not steps):
        return _check_step(_bundle_layout(folder, prefixes[0]), step)
    named = tf_bundle.latest(folder, prefixes)
    if not steps and named is not None and step is None:
        return _bundle_layout(folder, named)
    if not steps:
        hint = f"open one by its prefix: {folder.where(prefixes[0])}"
        leaves = [(prefix, "") for prefix in prefixes]
        raise CheckpointError("several TensorFlow checkpoints are here", leaves=leaves, where=folder.path, hint=hint)
    chosen = [prefix for number, prefix in steps if number == (steps[-1][0] if step is None else step)]
    if not chosen:
        raise _no_such_step(step, tuple(steps), folder.path)
    return replace(_bundle_layout(folder, chosen[-1]), path=folder.path, steps=tuple(steps), root=folder.path)


def _flax_layout(path: str, folder: Folder, name: str) -> Layout:
    step = step_of(name) if name.startswith("checkpoint") else None
    root = None if step is None else folder.path
    return Layout(path, "flax_msgpack", {DEFAULT_ITEM: path}, step=step, step_name=name, root=root, writer="flax")


def _locate_folder(folder: Folder, step: int | None) -> Layout:
    names = folder.names()
    outer = enclosing_item(folder)
    if outer is not None:
        raise _inside(folder.path, outer)
    prefixes = tf_bundle.bundles(names)
    if prefixes and "_METADATA" not in names:
        return _bundles_layout(folder, prefixes, step)
    if is_tree(folder, names):
        return _check_step(_item_layout(folder, names), step)
    steps = [] if _is_marked_step(folder, names) else _steps(folder, names)
    if steps:
        return _root_layout(folder, names, steps, step)
    if is_safetensors(names) and not _is_marked_step(folder, names):
        return _check_step(Layout(folder.path, "safetensors", {DEFAULT_ITEM: folder.path}), step)
    if is_step(folder, names):
        return _check_step(_step_layout(folder, names), step)
    raise _no_checkpoint(folder, names)


def _is_marked_step(folder: Folder, names: Mapping[str, bool]) -> bool:
    return V1_MARKER in names or isinstance(item_handlers(folder, names), dict)


def _steps(folder: Folder, names: Mapping[str, bool]) -> list[tuple[int, str]]:
    """The steps of a root, finished or not; [] for a folder that is one step whose items happen to end in numbers."""
    trees, steps = [], []
    for name, is_folder in names.items():
        number = step_of(name)
        child = folder.folder(name)
        if not is_folder:
            if number is not None and name.startswith("checkpoint_") and is_msgpack_map(folder, name):
                steps.append((number, name))
            continue
        inside = child.names()
        if is_tree(child, inside):
            trees.append(name)
        elif number is None or not is_step(child, inside):
            continue
        if number is not None:
            steps.append((number, name))
    is_one_step = all(name in trees for _, name in steps) and any(step_of(name) is None for name in trees)
    return [] if is_one_step else sorted(steps)


def _root_layout(folder: Folder, names: Mapping[str, bool], found: list[tuple[int, str]], step: int | None) -> Layout:
    lacking = unfinished_in_store(folder, [name for _, name in found])
    unfinished = tuple(name for name in names if names[name] and (finished_name(name) or name in lacking))
    steps = tuple((number, name) for number, name in found if name not in unfinished)
    if not steps:
        raise CheckpointError(
            "no step here is finished",
            leaves=[(name, "never finished") for name in unfinished],
            where=folder.path,
            hint="a manager that is still saving: manager.wait_until_finished(); one that was never finished opens by "
            f"its full name: {folder.where(unfinished[-1])}",
        )
    chosen = [name for number, name in steps if number == (steps[-1][0] if step is None else step)]
    if not chosen:
        raise _no_such_step(step, steps, folder.path)
    layout = _child_layout(folder, chosen[-1])
    return replace(layout, path=folder.path, steps=steps, unfinished=unfinished, root=folder.path)


def _child_layout(folder: Folder, name: str) -> Layout:
    child = folder.folder(name)
    if not folder.has_folder(name):
        return _flax_layout(child.path, folder, name)
    names = child.names()
    return _item_layout(child, names) if is_tree(child, names) else _step_layout(child, names)


def _no_such_step(step: int | None, steps: tuple[tuple[int, str], ...], where: str) -> CheckpointError:
    known = ", ".join(shorten([str(number) for number, _ in steps][::-1]))
    return CheckpointError(f"there is no step {step}", where=where, hint=f"steps here: {known}")


def _check_step(layout: Layout, step: int | None) -> Layout:
    """`step=` for a path that is one step itself: it must be that one."""
    if step is None or step == layout.step:
        return layout
    steps = () if layout.step is None else ((layout.step, layout.step_name or ""),)
    if steps:
        raise _no_such_step(step, steps, layout.path)
    raise CheckpointError(f"there is no step {step}: this is one checkpoint, not a run", where=layout.path)


def _item_layout(folder: Folder, names: Mapping[str, bool]) -> Layout:
    """One item, alone or pointed at inside its step."""
    shown = finished_name(folder.name) or folder.name
    parent = folder.parent
    number, outer = step_of(folder.name), step_of(parent.name)
    is_in_step = number is None and _is_step_of(parent, folder.name)
    step_folder = parent if is_in_step else folder
    step = outer if is_in_step else number
    strays = {name: folder.where(name) for name, is_folder in names.items() if _is_stray(name, is_folder)}
    return Layout(
        path=folder.path,
        format="array_metadatas" if is_array_metadatas(names) else "orbax",
        items={shown if is_in_step else DEFAULT_ITEM: folder.path},
        other_items=strays,
        step=step,
        step_name=None if step is None else step_folder.name,
        is_finished=finished_name(folder.name) is None and finished_name(parent.name) is None,
        root=None if step is None else step_folder.parent.path,
    )


def _is_step_of(parent: Folder, item: str) -> bool:
    """Whether an item's folder lies in a step: `run_7/ckpt` may be any folder of a user's."""
    name = finished_name(parent.name) or parent.name
    return name.isdecimal() or item == DEFAULT_ITEM or _is_marked_step(parent, _names_or_none(parent))


def _names_or_none(folder: Folder) -> Mapping[str, bool]:
    try:
        return folder.names()
    except CheckpointError:
        return {}


def _is_stray(name: str, is_folder: bool) -> bool:
    return not is_folder and not name.startswith((".", "_")) and name not in _ITEM_FILES


def _step_layout(folder: Folder, names: Mapping[str, bool]) -> Layout:
    found = tree_items(folder, names)
    others = [name for name in names if name not in {*found.values(), *OWN_NAMES} and not name.startswith(".")]
    inner = [child for child in found.values() if finished_name(child) is not None]
    kinds = {is_array_metadatas(folder.folder(name).names()) for name in found.values()}
    step = step_of(folder.name)
    return Layout(
        path=folder.path,
        format="array_metadatas" if kinds == {True} else "orbax",
        items={name: folder.where(child) for name, child in found.items()},
        other_items={name: folder.where(name) for name in others},
        step=step,
        step_name=None if step is None else folder.name,
        is_finished=finished_name(folder.name) is None and not inner,
        is_composite=step is None and any(folder.has_file(f"{name}/metadata") for name in others),
        unfinished=tuple(inner),
        root=None if step is None else folder.parent.path,
    )


def _no_checkpoint(folder: Folder, names: Mapping[str, bool]) -> CheckpointError:
    if not names:
        return CheckpointError("the folder is empty", where=folder.path)
    unfinished = [name for name, is_folder in names.items() if is_folder and finished_name(name)]
    foreign = [f"{name} is {kind}" for name in names for end, kind in _FOREIGN.items() if name.endswith(end)]
    hint = "; ".join(shorten(foreign, 3)) or None
    if unfinished:
        hint = f"only saves that were never finished are here: {', '.join(shorten(unfinished))}"
    return CheckpointError(
        "this is no Orbax or Flax checkpoint", where=folder.path, leaves=[(_LOOKED_FOR, "")], hint=hint
    )


def load(layout: Layout, item: str) -> Source:
    """Open one tree item of a layout."""
    place = layout.folder_at(layout.items[item])
    with _paused_collection():
        if layout.format == "tf_bundle" or place.kind() != "folder":
            return _load_file(place.parent, place.name, layout.format)
        return _load_folder(place, item)


@contextmanager
def _paused_collection() -> Iterator[None]:
    """Millions of small objects are made here and none is garbage: looking for it would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load_file(folder: Folder, name: str, format: str) -> Source:
    match format:
        case "safetensors":
            return open_safetensors(folder, name)
        case "haiku_pickle":
            return haiku_pickle.open_pickle(folder, name)
        case "tf_bundle":
            return tf_bundle.open_bundle(folder, name)
        case "array_metadatas":
            return array_metadatas.open_files(folder, [name])
    return flax_msgpack.open_file(folder, name)


def _load_folder(folder: Folder, item: str) -> Source:
    names = folder.names()
    if is_safetensors(names) and not is_tree(folder, names):
        return open_safetensors(folder)
    if is_array_metadatas(names):
        inside = folder.folder(ARRAY_METADATAS) if ARRAY_METADATAS in names else folder
        return array_metadatas.open_files(inside, list(inside.names()))
    key = random_key_name(names)
    if key is not None and "_METADATA" not in names:
        return open_random_key(folder, key)
    return open_item(folder, is_one_array=_is_one_array(folder, names, item))


def _is_one_array(folder: Folder, names: Mapping[str, bool], item: str) -> bool:
    """An ArraySave item looks like a tree with one key, `checkpoint`: the handlers tell, else it is taken as one."""
    handlers = item_handlers(folder, names)
    if handlers is None:
        outer = item_handlers(folder.parent, _names_or_none(folder.parent))
        handlers = outer.get(item) if isinstance(outer, dict) else None
    return not isinstance(handlers, str) or "ArrayCheckpointHandler" in handlers
