"""Changes to Keras and uses of its private members; no other package makes any.

version      the tested versions of Keras
exchange     the mixins' requirements of an optimizer's exchanger
adam_noise   Adam's update, corrected for the noise of one node's gradients
momenta      optimizers that exchange momenta in place of gradients, some only from a later step on
step         takes part in the step of an optimizer: exchanges where Keras would clip; updates all
             variables together
optimizers   copies of optimizers, and state that Keras does not save
shards       an optimizer that updates this rank's shards of the weights
models       layers, names, seeds and statistics of a model; values that Keras saves; the statistics
             of a batch in batch normalization
fit          changes the first epoch, the train function and the train step of `fit`; finds its
             callbacks
metrics      finds the metrics whose variables are sums
adapted      preprocessing layers that were adapted, also outside of models
names        unique names of variables; facts about variables
"""

from tfcommx.keras_internals.adapted import (
    finalize_normalizations,
    record_adapted_layers,
    recorded_layers,
)
from tfcommx.keras_internals.exchange import StepUnderWay
from tfcommx.keras_internals.fit import (
    averages_in_weights,
    begin_at_epoch,
    begin_train_steps_with,
    build_metrics,
    callbacks_of_fit,
    class_weight_of_fit,
    replace_train_function,
    restore_train_function,
    restore_train_step,
    skip_steps,
)
from tfcommx.keras_internals.metrics import metrics_in, sums_in, watch_update
from tfcommx.keras_internals.models import (
    OwnMoments,
    all_generators,
    assigns_weights,
    bytes_of,
    call_alike,
    calls_recorded,
    constants_of,
    finalize_layers,
    given_name,
    layers_of,
    loss_of,
    numbered_stem,
    own_variables,
    recurrent_states,
    saved_values,
    statistics_averaged,
    statistics_of,
    trace_again,
    untracked_variables,
    variables_with_own_files,
)
from tfcommx.keras_internals.momenta import LearnsThenSendsMomentum, OfAll, SendsMomentum
from tfcommx.keras_internals.names import AGREED_NAMES, ByVariable, VariableNames, path_of
from tfcommx.keras_internals.optimizers import (
    accumulated_gradients,
    array_of,
    copy_state,
    copy_with,
    entries_of,
    has_schedule,
    inner_optimizer,
    kinds_of,
    mix_into,
    moving_averages,
    plain_copy,
    slots_of,
    steps_of,
    trainable_variables,
    unlisted,
    values_of,
)
from tfcommx.keras_internals.shards import UpdatesShards, require_shardable
from tfcommx.keras_internals.step import (
    AgreedLossScale,
    ExchangesGradients,
    UpdatesTogether,
    build_early,
    compiled_by_xla,
    surround_steps,
    traced_batch,
)
from tfcommx.keras_internals.version import require_fit_keras

# At the import, because a private member that is missing would otherwise fail within a step
require_fit_keras()
