"""DistributedOptimizer: wrap a Keras 3 optimizer so that ranks exchange its gradients.

    fit / apply_gradients -> apply -> unscale -> accumulate -> [exchange over the ranks] -> clip ->
    [update, by the strategy] -> EMA

The wrapped optimizer is an instance of a subclass that carries its base's name and module and adds
nothing to its variables or its config. So a saved model holds the plain optimizer and loads with
and without tfcommx.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import keras

from tfcommx.collectives import process
from tfcommx.core import AUTO, ConfigurationError, Links, Plan, Profile, Scheme
from tfcommx.keras_internals.momenta import SendsMomentum
from tfcommx.keras_internals.optimizers import copy_state, copy_with, inner_optimizer, plain_copy
from tfcommx.keras_internals.shards import UpdatesShards, require_shardable
from tfcommx.keras_internals.step import AgreedLossScale, ExchangesGradients
from tfcommx.optim.exchanger import Exchanger
from tfcommx.optim.requested_plan import ExchangeSettings
from tfcommx.optim.step_guard import require_no_replicas
from tfcommx.strategies.strategy import Strategy
from tfcommx.strategies.table import strategy_of

P = ParamSpec("P")
R = TypeVar("R")

_ACCUMULATE = (
    "Give the optimizer that is wrapped Keras's `gradient_accumulation_steps`, which averages over "
    "the passes, as Horovod's average_aggregated_gradients=True does."
)
_BUCKETS = "Leave it out: plans have buckets, whose size is a scheme's `bucket_bytes`."
_DEVICES = "Leave it out: gradients are exchanged on the device that has them."
_LOCAL = "Wrap an optimizer for the shared variables, and use a plain one for those that are local."
# Argument of Horovod -> remedy
INSTEAD = {
    "compression": 'Give a scheme with a 16-bit wire: scheme=tfcommx.Scheme(wire="float16").',
    "backward_passes_per_step": _ACCUMULATE,
    "average_aggregated_gradients": _ACCUMULATE,
    "sparse_as_dense": "Leave it out: gradients of embeddings are made dense before they travel.",
    "gradient_predivide_factor": 'Leave it out: op="average" divides the sum.',
    "groups": _BUCKETS,
    "num_groups": _BUCKETS,
    "process_set": "There is none: all ranks exchange gradients.",
    "device_dense": _DEVICES,
    "device_sparse": _DEVICES,
    "name": "Leave it out: the optimizer keeps its name.",
    "use_locking": "Leave it out: Keras 3 has none.",
    "local_layers": _LOCAL,
    "scale_local_gradients": _LOCAL,
}
# hvd.Average, Sum, Adasum, Min, Max and Product are the numbers from 0.
_OPERATIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def refuse_horovod_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a replacement of Horovod's function: explain refused arguments before it runs.

    **Raises:** ConfigurationError that names the replacement.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        # Before the call, in which Python would refuse the argument without a remedy
        if argument := next((name for name in kwargs if name in INSTEAD), None):
            raise ConfigurationError(
                f"tfcommx.DistributedOptimizer has no `{argument}`. {INSTEAD[argument]} All "
                "arguments of Horovod: docs/how-to/move-from-horovod.md."
            )
        operation = kwargs.get("op")
        if isinstance(operation, int) and 0 <= operation < len(_OPERATIONS):
            raise ConfigurationError(
                f'op="average" or op="sum" is required. Received hvd.{_OPERATIONS[operation]}. '
                "For Keras Horovod has no others either; in a custom loop there is "
                "hvd.DistributedGradientTape."
            )
        return function(*args, **kwargs)

    return checked


@refuse_horovod_arguments
def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    scheme: Scheme | Mapping[str, Scheme] | None = None,
    op: str = "average",
    plan: Plan | None = None,
    links: Links | str | Path | None = None,
    strategy: str | Strategy = "synchronous",
    check_replicas_every: int | None = 100,
    profile: Profile | str | Path | None = None,
) -> keras.optimizers.Optimizer:
    """Wrap a Keras optimizer so that every rank trains with the gradients of all ranks.

    Works in `model.fit` and in custom loops (`apply_gradients`, `apply`), with clipping, EMA,
    gradient accumulation (one exchange per accumulated step) and LossScaleOptimizer, whose skipped
    steps are agreed between the ranks. Sparse gradients, as of embeddings, become dense: entries of
    the same row are added first. Keras alone does not, and Adam then squares each part.

    >>> import keras
    >>> import tfcommx as cx
    >>> _ = cx.init()
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    >>> sparse = cx.Scheme("allgather", "mstopk", density=0.01)
    >>> optimizer = cx.DistributedOptimizer(
    ...     keras.optimizers.Adam(0.001), {"*embedding*": sparse, "*": cx.Scheme()}
    ... )
    >>> optimizer = cx.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="root")
    >>> optimizer = cx.DistributedOptimizer(
    ...     keras.optimizers.SGD(0.1), strategy=cx.strategies.Rebroadcast(every=100)
    ... )

    By default, `Scheme("auto")`, the first steps are a trial, in which plain Horovod and the
    plans with the fastest predictions take turns: docs/explanation/planner.md.

    Args:
        optimizer: any Keras optimizer; its state, if it has some, is copied. Later changes to it,
            such as another learning rate, do not reach the copy: change that of the result.
        scheme: how gradients travel; a Scheme for all variables, or a mapping from patterns of
            variable paths (as in file names, the first match counts) to Schemes. `Scheme()` is
            plain Horovod: everything, by its allreduce; `Scheme(wire="float16")` the same in half
            the bytes. `Scheme("auto")`: the fastest of those that lose nothing;
            `Scheme("auto", wire="float16")`: gradients may travel in 16 bits;
            `Scheme("auto", "mstopk", density=0.01)`: it may select; `Scheme("auto", budget=0.15)`:
            at most this share of plain Horovod's bytes between nodes, with the least loss. None:
            `Scheme("auto")`; with an optimizer that sends its momentum, such as
            `cx.optimizers.OneBitAdam`, 1 or 2 bits an entry by "torus", or by "asa" with one slot a
            node.
        op: "average" or "sum" over the ranks.
        plan: a plan made before, in place of one from the scheme and the arguments below.
        links: the cost of messages on this cluster, or its file, which `tfcommx probe` wrote;
            None: nominal links, or those that "auto" measures.
        strategy: who updates the weights: "synchronous", "root", "rebroadcast", "sharded",
            "weight_averaging", "elastic_averaging" or "step_ahead"
            (docs/how-to/update-strategies.md), or an instance, with other options.
        check_replicas_every: steps, >= 1, after which the ranks compare weights, learning rate and
            step count, the first step among them; None: never. A difference ends all ranks with an
            error that names the difference, the ranks, and the usual cause.
        profile: the times at which the gradients of this model are ready, from `cx.profile`, or
            the file that `tfcommx profile` wrote; the same on all ranks. For "auto", and for
            mergings that depend on times.

    Returns:
        A new optimizer of a subclass of the same class. `optimizer.exchanger` holds the residuals
        and the counters.

    **Ranks:** all, with equal arguments; plan and strategy are agreed on the first step.
    **Cost:** of "auto" in a run without a cached choice: a quick measurement of the links (about
    9 MB through each port), some tenths of a second to some seconds of planning, at most 18 steps
    of the trial, and the tracing of three or four exchanges in place of one.
    **Raises:** LaunchError before init(). ConfigurationError for a scheme that cannot be carried
    out, momentum in both the scheme and the optimizer, gradients in 1 or 2 bits in front of a
    momentum, an optimizer wrapped twice, or, on several ranks, the scope of a tf.distribute
    strategy with replicas; in the first step for a budget that nothing fits.
    """
    _check_optimizer(optimizer)
    require_no_replicas()
    strategy, inner = strategy_of(strategy), inner_optimizer(optimizer)
    uses_ema = getattr(inner, "use_ema", False)
    if uses_ema and not strategy.in_lock_step:
        raise ConfigurationError(
            "use_ema=True cannot be combined with ElasticAveraging, whose centre is already a "
            "running average. Remove use_ema."
        )
    overwrites = getattr(inner, "ema_overwrite_frequency", None)
    if strategy.updates_apart and uses_ema and overwrites:
        raise ConfigurationError(
            f"With {strategy} each rank has a separate moving average for some steps, which "
            "must not replace weights that all ranks agree on. Received "
            f"ema_overwrite_frequency={overwrites!r}. Leave it out: `fit` ends with the moving "
            "average over all ranks."
        )
    schedule_free = getattr(keras.optimizers, "ScheduleFreeAdamW", ())  # From Keras 3.14 on
    if getattr(strategy, "momentum", "keep") == "reset" and isinstance(inner, schedule_free):
        raise ConfigurationError(
            "ScheduleFreeAdamW keeps weights in its momentum, and computes the next weights from "
            f'them: they must not be set to 0. Received momentum="reset" of {strategy}. Take '
            'momentum="average".'
        )
    if not isinstance(plan, Plan | None):
        raise ConfigurationError(f"`plan` must be a tfcommx.Plan or None. Received {plan!r}.")
    topology = process.current().topology
    settings = ExchangeSettings(
        operation=op,
        plan=plan,
        links=links if isinstance(links, Links | None) else Links.read(links, topology),
        strategy=strategy,
        check_replicas_every=check_replicas_every,
        profile=profile if isinstance(profile, Profile | None) else Profile.read(profile),
        # Adam's beta_1 counts, too, because gradients in 1 or 2 bits diverge in front of any
        # momentum
        own_momentum=getattr(inner, "momentum", 0.0) or getattr(inner, "beta_1", 0.0),
        sender=type(inner) if isinstance(inner, SendsMomentum) else None,
    )
    if strategy.shards_weights:
        require_shardable(inner)
    if scheme is None:
        scheme = Scheme(AUTO)
        if settings.sender is not None:
            # The route that sends fewer bytes on this cluster
            by_node = topology.slots > 1 and topology.nodes > 1 and not topology.uneven
            scheme = Scheme("torus" if by_node else "asa", wire=settings.sender.default_wire)
    return _wrap(optimizer, scheme, settings)


def _wrap(
    optimizer: keras.optimizers.Optimizer,
    schemes: Scheme | Mapping[str, Scheme],
    settings: ExchangeSettings,
) -> keras.optimizers.Optimizer:
    """Wrap an optimizer with checked settings. **Raises:** LaunchError before init()."""
    inner = inner_optimizer(optimizer)
    exchanger = Exchanger(process.current(), schemes, settings)
    exchanger.reduce_for_pickle = _reduce
    mixin = UpdatesShards if settings.strategy.shards_weights else ExchangesGradients
    wrapped = copy_with(mixin, inner)
    wrapped.exchanger = exchanger
    exchanger.serve(wrapped)
    if inner is not optimizer:
        # Both have the exchanger: the inner optimizer exchanges, and the outer one agrees with the
        # other ranks on the steps that are skipped
        wrapped = copy_with(AgreedLossScale, optimizer, inner_optimizer=wrapped)
        wrapped.exchanger, exchanger.guard.loss_scale = exchanger, "agreed"
    # Last, because it builds the copy, which asks the exchanger for its shards
    copy_state(wrapped, optimizer)
    return wrapped


def _reduce(wrapped: keras.optimizers.Optimizer) -> tuple[Any, ...]:
    # `copy.deepcopy` and `pickle` make the optimizer plain, as Keras does, and wrap it. Residuals
    # stay with the original, because copies of them would be sent twice
    exchanger = wrapped.exchanger
    return _wrap, (plain_copy(wrapped), exchanger.requested.schemes, exchanger.settings)


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    if type(optimizer).__module__.startswith("tf_keras"):
        raise ConfigurationError(
            "An optimizer of Keras 3 is required. Received "
            f"{type(optimizer).__name__} of tf_keras, which is Keras 2. Unset "
            "TF_USE_LEGACY_KERAS, and import keras, not tf_keras."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigurationError(
            "A Keras optimizer is required, such as keras.optimizers.SGD(0.1) or "
            f"keras.optimizers.get('adam'). Received {optimizer!r}. Optimizers, sessions and "
            "estimators of TensorFlow 1 are not supported: train a Keras model by `fit`, or in a "
            "loop as docs/how-to/move-from-horovod.md shows."
        )
    if type(inner_optimizer(optimizer)).__module__.partition(".")[0] == "horovod":
        raise ConfigurationError(
            f"A plain optimizer is required. Received {optimizer.name!r}, which "
            "hvd.DistributedOptimizer has wrapped. Leave Horovod's wrapper out: with Keras 3 it "
            "exchanges nothing."
        )
    if isinstance(inner_optimizer(optimizer), ExchangesGradients):
        raise ConfigurationError(
            f"A plain optimizer is required. Received {optimizer.name!r}, which is wrapped "
            "already. Wrap it once."
        )
