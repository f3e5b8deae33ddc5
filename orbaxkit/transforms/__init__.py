"""Transforms: plain values that turn a plan into another one."""

from orbaxkit.transforms.chaining import chain as chain
from orbaxkit.transforms.choosing import drop as drop
from orbaxkit.transforms.choosing import select as select
from orbaxkit.transforms.naming import rename as rename
from orbaxkit.transforms.values import affine as affine
from orbaxkit.transforms.values import cast as cast
