"""Refuse a Keras without the private members that this package uses; warn of an untested one."""

import inspect
import warnings

import keras

# Major and minor versions with which `make test-versions` passes, as in requirements.txt
TESTED = ("3.12", "3.13", "3.14", "3.15")

# Class of Keras -> its private members that this package calls, overrides or reads
PRIVATE_MEMBERS: dict[type, tuple[str, ...]] = {
    keras.optimizers.Optimizer: (
        "_accumulated_gradients",
        "_apply_weight_decay",
        "_backend_apply_gradients",
        "_backend_update_step",
        "_clip_gradients",
        "_exclude_from_weight_decay",
        "_exclude_from_weight_decay_cache",
        "_exclude_from_weight_decay_pattern",
        "_get_variable_index",
        "_iterations",
        "_learning_rate",
        "_model_variables_moving_average",
        "_overwrite_model_variables_with_average_value",
        "_overwrite_variables_directly_with_gradients",
        "_trainable_variables",
        "_trainable_variables_indices",
        "_untrack_variable",
        "_update_model_variables_moving_average",
        "_use_weight_decay",
        "_var_key",
        "_variables",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model", "_tf_swap_variables"),
    keras.optimizers.Adam: ("_momentums", "_velocities"),
    keras.layers.BatchNormalization: ("_moments", "_reduction_axes"),
    keras.Model: ("_compute_loss", "_initial_epoch", "_symbolic_build"),
    keras.layers.Layer: (
        "_call_has_training_arg",
        "_flatten_layers",
        "_layers",
        "_non_trainable_variables",
        "_seed_generators",
        "_trainable_variables",
    ),
}


def members_of(owner: type) -> set[str]:
    """Return the names of a class's members, and all names in its methods' code.

    No instance is made, because an optimizer creates a variable, and `cx.init` must be called
    before the first variable.
    """
    names = set(dir(owner))
    for base in owner.__mro__:
        # Attributes that methods set are no members of the class, but names in the methods' code
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None)
            names.update(getattr(code, "co_names", ()))
    return names


def require_fit_keras(version: str = keras.__version__) -> None:
    """Refuse a Keras without a private member that is used; warn of an untested one.

    >>> require_fit_keras("3.15.2")

    Args:
        version: such as "3.15.0"; the installed one by default.

    **Raises:** ImportError that names the missing members, the tested versions and a remedy.
    """
    missing = [
        f"{owner.__name__}.{member}"
        for owner, members in PRIVATE_MEMBERS.items()
        for member in sorted(set(members) - members_of(owner))
    ]
    tested = f"Tested is Keras {', '.join(TESTED)}: pip install 'keras=={TESTED[-1]}.*'"
    if missing:
        raise ImportError(
            "tfcommx takes part in the step of Keras's optimizers by members that are private to "
            f"Keras. Keras {version} has no {', '.join(missing)}. {tested}"
        )
    if ".".join(version.split(".")[:2]) not in TESTED:
        warnings.warn(
            f"tfcommx has not been tested with Keras {version}, but all private members of Keras "
            f"that it uses are there. {tested}",
            stacklevel=2,
        )
