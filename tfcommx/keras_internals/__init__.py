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
fit          changes the first epoch, the train function and the train step of `fit`
metrics      finds the metrics whose variables are sums
"""

from tfcommx.keras_internals.exchange import StepUnderWay as StepUnderWay
from tfcommx.keras_internals.fit import begin_at_epoch as begin_at_epoch
from tfcommx.keras_internals.fit import begin_train_steps_with as begin_train_steps_with
from tfcommx.keras_internals.fit import replace_train_function as replace_train_function
from tfcommx.keras_internals.fit import restore_train_step as restore_train_step
from tfcommx.keras_internals.fit import skip_steps as skip_steps
from tfcommx.keras_internals.metrics import metrics_in as metrics_in
from tfcommx.keras_internals.metrics import sums_in as sums_in
from tfcommx.keras_internals.metrics import watch_update as watch_update
from tfcommx.keras_internals.models import OwnMoments as OwnMoments
from tfcommx.keras_internals.models import bytes_of as bytes_of
from tfcommx.keras_internals.models import call_alike as call_alike
from tfcommx.keras_internals.models import calls_recorded as calls_recorded
from tfcommx.keras_internals.models import constants_of as constants_of
from tfcommx.keras_internals.models import finalize_layers as finalize_layers
from tfcommx.keras_internals.models import given_name as given_name
from tfcommx.keras_internals.models import layers_of as layers_of
from tfcommx.keras_internals.models import loss_of as loss_of
from tfcommx.keras_internals.models import numbered_stem as numbered_stem
from tfcommx.keras_internals.models import own_variables as own_variables
from tfcommx.keras_internals.models import saved_values as saved_values
from tfcommx.keras_internals.models import seed_generators as seed_generators
from tfcommx.keras_internals.models import statistics_of as statistics_of
from tfcommx.keras_internals.models import variables_with_own_files as variables_with_own_files
from tfcommx.keras_internals.momenta import LearnsThenSendsMomentum as LearnsThenSendsMomentum
from tfcommx.keras_internals.momenta import OfAll as OfAll
from tfcommx.keras_internals.momenta import SendsMomentum as SendsMomentum
from tfcommx.keras_internals.optimizers import accumulated_gradients as accumulated_gradients
from tfcommx.keras_internals.optimizers import copy_state as copy_state
from tfcommx.keras_internals.optimizers import copy_with as copy_with
from tfcommx.keras_internals.optimizers import has_schedule as has_schedule
from tfcommx.keras_internals.optimizers import inner_optimizer as inner_optimizer
from tfcommx.keras_internals.optimizers import mix_into as mix_into
from tfcommx.keras_internals.optimizers import moving_averages as moving_averages
from tfcommx.keras_internals.optimizers import plain_copy as plain_copy
from tfcommx.keras_internals.optimizers import slots_of as slots_of
from tfcommx.keras_internals.optimizers import steps_of as steps_of
from tfcommx.keras_internals.optimizers import trainable_variables as trainable_variables
from tfcommx.keras_internals.optimizers import unlisted as unlisted
from tfcommx.keras_internals.optimizers import values_of as values_of
from tfcommx.keras_internals.shards import UpdatesShards as UpdatesShards
from tfcommx.keras_internals.shards import require_shardable as require_shardable
from tfcommx.keras_internals.step import AgreedLossScale as AgreedLossScale
from tfcommx.keras_internals.step import ExchangesGradients as ExchangesGradients
from tfcommx.keras_internals.step import UpdatesTogether as UpdatesTogether
from tfcommx.keras_internals.step import compiled_by_xla as compiled_by_xla
from tfcommx.keras_internals.step import surround_steps as surround_steps
from tfcommx.keras_internals.step import traced_batch as traced_batch
from tfcommx.keras_internals.version import require_fit_keras

require_fit_keras()
