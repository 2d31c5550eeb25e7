"""Folding: how any number of replicas becomes a power of two, and back.

With n = 2^k + r replicas, each odd one of the first 2r (an extra) hands its buffer to
the even one before it, which goes on for both and sends the result back (Thakur,
Rabenseifner and Gropp, 2005, section 4.5).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdp.collectives import base
from jdp.collectives.base import Op, ReplicaGroup


class Team(NamedTuple):
    """The 2^k replicas that go on."""

    group: ReplicaGroup
    size: int
    num_extras: int
    rank: jax.Array  # int32 (), in the team; that of its host for an extra.
    is_host: jax.Array  # bool ()
    is_extra: jax.Array  # bool ()

    def pairs(self, distance: int) -> list[tuple[int, int]]:
        """Every member sends to the one whose rank differs in the bit `distance`."""
        ranks = range(self.size)
        return [(self.member(v), self.member(v ^ distance)) for v in ranks]

    def member(self, rank: int) -> int:
        """Returns the rank in the group of a rank in the team."""
        return 2 * rank if rank < self.num_extras else rank + self.num_extras

    def is_upper(self, distance: int) -> jax.Array:
        """Whether this replica is the one of a pair with the higher rank, bool ()."""
        return self.rank // distance % 2 == 1

    def swap(self, x: jax.Array, distance: int) -> tuple[jax.Array, jax.Array]:
        """Swaps `x` within pairs; returns that of the lower and of the higher rank.

        Both of a pair then compute the same of it: a + b is b + a, but for which NaN,
        or which zero, comes out.
        """
        other = base.exchange(x, self.group, self.pairs(distance))
        is_upper = self.is_upper(distance)
        return jnp.where(is_upper, other, x), jnp.where(is_upper, x, other)

    def swap_rows(self, x: jax.Array, distance: int) -> jax.Array:
        """Swaps `x`, shape (n,), within pairs; returns both, shape (2, n).

        Row 0 is that of the lower rank. Whatever a program makes of the rows, both of a
        pair get the same bits: they are found by address. Of a selection the compiler
        may make two loops, one for each rank, and fuse products and sums in one of them
        otherwise than in the other.
        """
        other = base.exchange(x, self.group, self.pairs(distance))
        is_upper = self.is_upper(distance).astype(jnp.int32)
        both = jnp.stack([x, other])
        return jnp.stack([both[is_upper], both[1 - is_upper]])

    def from_extras(self, x: jax.Array) -> jax.Array:
        """Sends `x` of each extra to its host; the others get something undefined."""
        return base.exchange(
            x, self.group, [(2 * v + 1, 2 * v) for v in range(self.num_extras)]
        )

    def to_extras(self, x: jax.Array) -> jax.Array:
        """Sends `x` of each host to its extra; the others get something undefined."""
        return base.exchange(
            x, self.group, [(2 * v, 2 * v + 1) for v in range(self.num_extras)]
        )


def make_team(group: ReplicaGroup) -> Team:
    """Returns the largest team of a power of two."""
    size = 1 << (group.size.bit_length() - 1)
    extras = group.size - size
    rank = group.rank
    is_folded = rank < 2 * extras
    return Team(
        group=group,
        size=size,
        num_extras=extras,
        rank=jnp.where(is_folded, rank // 2, rank - extras),
        is_host=is_folded & (rank % 2 == 0),
        is_extra=is_folded & (rank % 2 == 1),
    )


def fold_in(team: Team, x: jax.Array, op: Op) -> jax.Array:
    """Adds what the extras hold to what their hosts hold."""
    if not team.num_extras:
        return x
    both = base.combine(op, x, team.from_extras(x))
    return jnp.where(team.is_host, both, x.astype(both.dtype))


def fold_out(team: Team, x: jax.Array) -> jax.Array:
    """Gives the extras what their hosts hold."""
    if not team.num_extras:
        return x
    return jnp.where(team.is_extra, team.to_extras(x), x)
