"""Reduce options: how are gradients packed, sent and summed, and over which axis?"""

from typing import NamedTuple

from jdp.collectives import auto, xla
from jdp.gradients import option_checks
from jdp.hooks.base import CommHook
from jdp.replicas import axes
from jdp.trees.buckets import BucketPlan, Packing
from jdp.types import AllReduce, AllReduceOption, AxisName

AUTO = auto.auto_all_reduce.value


class ReduceOptions(NamedTuple):
    """How gradients are averaged; see `jdp.sync_gradients`."""

    axis_name: AxisName  # (): not given; see `here`.
    plan: BucketPlan | None = None
    packing: Packing | None = None
    all_reduce: AllReduce = xla.PLAIN
    hook: CommHook | None = None

    def here(self) -> "ReduceOptions":
        """Returns the options of a call that is traced: with an axis.

        Raises:
          ValueError: the step has `num_shards`, which excludes the hook or the
            all-reduce.
        """
        if axes.traces_shards():
            self._check_fits_shards()
        return self if self.axis_name else self._replace(axis_name=axes.find(None))

    def _check_fits_shards(self) -> None:
        if self.hook is not None and not self.hook.is_elementwise:
            raise ValueError(
                f"The step has `num_shards`, and the hook `{self.hook.name}` is not "
                "elementwise: what it leaves out depends on what travels together. "
                "Take `jdp.hooks.cast`, or none."
            )
        if self.all_reduce not in (AUTO, xla.PLAIN):
            raise ValueError(
                "The step has `num_shards`, and so reduces along one fixed tree: leave "
                f'`all_reduce` at "auto", got {self.all_reduce.name!r}.'
            )


def make_options(
    axis_name: AxisName | None,
    plan: BucketPlan | None,
    packing: Packing | None,
    all_reduce: AllReduceOption,
    hook: CommHook | None = None,
) -> ReduceOptions:
    """Validates the public arguments and resolves them into `ReduceOptions`.

    Raises:
      ValueError: `axis_name` is not a name, or names; `all_reduce` is neither a
        function nor "auto", or does not sum; `packing` is unknown, or "tuple" with a
        hook or an `all_reduce` that packs.
      TypeError: `plan` is not a plan, or `hook` is not a hook.
    """
    if hook is not None or packing is not None:
        option_checks.check_hook(hook, packing)
    return ReduceOptions(
        axes.as_option(axis_name),
        plan if plan is None else option_checks.check_plan(plan),
        packing,
        AUTO
        if isinstance(all_reduce, str) and all_reduce == "auto"
        else option_checks.find_all_reduce(all_reduce, packing),
        hook,
    )
