"""The mesh of a test of links: every pair of ranks connected, by the link that the fixture ``run`` asks for."""

from __future__ import annotations

import os

from pipeline.mesh import Mesh, make_mesh

LINK = "TEST_LINK"
"""The variable of the environment that names it."""


def connected_mesh() -> Mesh:
    """The mesh of the calling rank."""
    mesh = make_mesh(device="cpu", link=os.environ.get(LINK, "auto"))
    mesh.link.connect([(a, b) for a in range(mesh.size) for b in range(mesh.size) if a != b])
    return mesh
