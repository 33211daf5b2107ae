"""What never changes in the life of a journal: its id, its form, its token mode, its codes."""

import uuid
from collections.abc import Mapping

import attrs

from laneway.journal.chain import Head, meta_chain
from laneway.journal.codec import Codec
from laneway.journal.edges import DECLARED, Edges
from laneway.journal.schema import META_KEYS, SCHEMA_VERSION


@attrs.frozen(eq=False)
class Meta:
    """The rows of ``meta`` and of ``edge``; ``edges`` is None in a file of version 1."""

    rows: Mapping[str, str]
    edges: Edges | None

    @property
    def journal_id(self) -> str:
        """A random number drawn when the journal was made."""
        return self.rows["journal_id"]

    @property
    def version(self) -> int:
        """The version of its schema."""
        return int(self.rows["schema_version"])

    @property
    def tokens(self) -> str:
        """``full`` or ``digest``."""
        return self.rows["tokens"]

    def origin(self) -> Head:
        """Return the head before the first step."""
        edges = [] if self.edges is None else self.edges.rows()
        return Head(0, 0, meta_chain(self.rows.items(), edges))

    def codec(self) -> Codec:
        """Return how its steps are written."""
        return Codec(self.tokens, edges=self.edges)


def new_meta(tokens: str) -> Meta:
    """Return what a journal that is made now has."""
    values = (uuid.uuid4().hex, str(SCHEMA_VERSION), tokens)
    return Meta(dict(zip(META_KEYS, values, strict=True)), DECLARED)
