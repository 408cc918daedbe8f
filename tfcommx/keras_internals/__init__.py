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

from tfcommx.keras_internals.version import require_fit_keras

# At the import, because a private member that is missing would otherwise fail within a step
require_fit_keras()
