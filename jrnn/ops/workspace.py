"""Workspace blobs, in which the bodies of Do operators keep local blobs for their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrnn.errors import OpError
from jrnn.registry import op


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkspaceStack:
    """A stack of workspaces, each the local blobs of one execution of a Do body; the last one is on top."""

    frames: tuple[Mapping[str, Any], ...] = ()

    def push(self, frame: Mapping[str, Any]) -> WorkspaceStack:
        return WorkspaceStack((*self.frames, dict(frame)))

    def pop(self) -> tuple[Mapping[str, Any], WorkspaceStack]:
        if not self.frames:
            raise OpError(
                "its workspace is empty: the forward Do did not run, or it ran in a traced loop, which keeps no workspaces; "
                "take that gradient with jax.grad, or run the net with run_net"
            )
        return self.frames[-1], WorkspaceStack(self.frames[:-1])


def as_stack(value: Any) -> WorkspaceStack:
    if not isinstance(value, WorkspaceStack):
        raise OpError(f"its last input must be a workspace, made by CreateScope; it is {type(value).__name__}")
    return value


@op("CreateScope", gradient="forbidden")
def create_scope():
    return WorkspaceStack()


@op("HasScope", gradient="forbidden")
def has_scope(workspace):
    return np.asarray([bool(as_stack(workspace).frames)])
