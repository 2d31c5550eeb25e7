"""Folding: reduction of any number of replicas to a power of two, and back.

With n = 2^k + r replicas, each odd replica of the first 2r (an extra) sends its buffer
to the even replica before it (its host). The host continues for both and sends the
result back (Thakur, Rabenseifner and Gropp, 2005, section 4.5).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdp.collectives import base
from jdp.collectives.base import Op, ReplicaGroup


class Team(NamedTuple):
    """The 2^k replicas that continue after folding."""

    group: ReplicaGroup
    size: int
    num_extras: int
    rank: jax.Array  # int32 (), in the team; for an extra the rank of its host.
    is_host: jax.Array  # bool ()
    is_extra: jax.Array  # bool ()

    def pairs(self, distance: int) -> list[tuple[int, int]]:
        """Returns pairs of members whose ranks differ in the bit `distance`."""
        ranks = range(self.size)
        return [(self.member(v), self.member(v ^ distance)) for v in ranks]

    def member(self, rank: int) -> int:
        """Returns the group rank of a team rank."""
        return 2 * rank if rank < self.num_extras else rank + self.num_extras

    def is_upper(self, distance: int) -> jax.Array:
        """Whether this replica has the higher rank of its pair, bool ()."""
        return self.rank // distance % 2 == 1

    def swap(self, x: jax.Array, distance: int) -> tuple[jax.Array, jax.Array]:
        """Swaps `x` within pairs; returns `x` of the lower and of the higher rank.

        So both replicas of a pair compute the same sum, down to which NaN and which
        zero comes out.
        """
        other = base.exchange(x, self.group, self.pairs(distance))
        is_upper = self.is_upper(distance)
        return jnp.where(is_upper, other, x), jnp.where(is_upper, x, other)

    def swap_rows(self, x: jax.Array, distance: int) -> jax.Array:
        """Swaps `x`, shape (n,), within pairs; returns both, shape (2, n).

        Row 0 is `x` of the lower rank. Rows are selected by address, so both replicas
        of a pair compute the same bits from them. With `jnp.where` the compiler may
        make one loop per rank and fuse products and sums differently in each.
        """
        other = base.exchange(x, self.group, self.pairs(distance))
        is_upper = self.is_upper(distance).astype(jnp.int32)
        both = jnp.stack([x, other])
        return jnp.stack([both[is_upper], both[1 - is_upper]])

    def from_extras(self, x: jax.Array) -> jax.Array:
        """Sends `x` of each extra to its host; others get undefined values."""
        return base.exchange(
            x, self.group, [(2 * v + 1, 2 * v) for v in range(self.num_extras)]
        )

    def to_extras(self, x: jax.Array) -> jax.Array:
        """Sends `x` of each host to its extra; others get undefined values."""
        return base.exchange(
            x, self.group, [(2 * v, 2 * v + 1) for v in range(self.num_extras)]
        )


def make_team(group: ReplicaGroup) -> Team:
    """Returns the largest team whose size is a power of two."""
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
    """Reduces the values of extras into those that their hosts hold."""
    if not team.num_extras:
        return x
    both = base.combine(op, x, team.from_extras(x))
    return jnp.where(team.is_host, both, x.astype(both.dtype))


def fold_out(team: Team, x: jax.Array) -> jax.Array:
    """Sends the values of hosts to their extras."""
    if not team.num_extras:
        return x
    return jnp.where(team.is_extra, team.to_extras(x), x)
