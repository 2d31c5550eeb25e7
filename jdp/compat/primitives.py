"""Primitives: the names that JAX's operations have in a jaxpr, by how they behave.

Every table of such names stands here. `tests/compat/test_primitives.py` checks each
against the installed JAX.
"""

from typing import Literal

# The last, or the first, version of JAX with a primitive. All supported versions have
# the other primitives.
UNTIL = {"call": (0, 10), "closed_call": (0, 10)}
SINCE = {
    "log2": (0, 11),
    "one_minus_square": (0, 11),
    "pbroadcast_dynamic": (0, 12),
    "unreduced_pmax": (0, 11),
    "unreduced_pmin": (0, 11),
}
# Primitives of packages that need not be installed: TensorFlow's and jax-triton's.
OF_OTHER_PACKAGES = frozenset({"call_tf", "triton_kernel_call"})


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- Calls: a jaxpr runs on the operands of the equation -----------------------------

CALLS = _names("closed_call jit remat2")
CUSTOM_RULES = _names("custom_jvp_call custom_vjp_call")
# Their results are the results of the jaxpr that they hold.
INLINABLE = CALLS | CUSTOM_RULES
# Linear functions with a transpose of their own.
CUSTOM_TRANSPOSES = _names("custom_lin linear_call")
# Calls through which values are followed.
FOLLOWED_CALLS = INLINABLE | _names(
    "call composite custom_vmap_call eval_jaxpr linear_call shard_map"
)

# Their jaxprs run by rules of their own.
CONTROL = _names("cond custom_linear_solve run_state scan while")

# --- Foreign code --------------------------------------------------------------------

# These run functions on the host, which may read anything.
CALLBACKS = _names("buffer_callback io_callback pure_callback")
# Kernels written by hand.
KERNELS = _names("ffi_call mpmd_map pallas_call")
# May send their operands.
OPAQUE = (
    CALLBACKS
    | KERNELS
    | OF_OTHER_PACKAGES
    | _names("custom_partitioning jdp_host_collective mosaic_gpu_p tpu_custom_call")
)
# Draws from state on the device. `lax.empty`, which returns uninitialised memory, is
# not here: `jnp.empty` consists of it, and programs fill the memory.
STATEFUL = _names("rng_uniform")
# Random numbers or keys that are computed from a key, their first operand.
DRAWS = _names("random_bits random_fold_in random_gamma random_split")
# Classes of effects on axes and references, of printing, and of assertions.
INSIDE_EFFECTS = _names(
    "AccumEffect DebugEffect InternalMutableArrayEffect NamedAxisEffect NoDCEEffect "
    "OrderedDebugEffect ReadEffect SingleSideCollectiveEffect WriteEffect"
)

# --- Collectives ---------------------------------------------------------------------

# They leave the same value on all replicas of their axes.
UNITING = _names(
    "all_gather all_gather_invariant all_gather_reduced jdp_replicated pbroadcast pmax "
    "pmin psum psum_invariant"
)
# They leave a different value on each replica.
MOVING = _names(
    "all_to_all pbroadcast_dynamic ppermute precv psend ragged_all_to_all "
    "reduce_scatter unreduced_pmax unreduced_pmin unreduced_psum "
    "unreduced_reduce_scatter"
)
# Over axes of size 1, they return their operand, in its shape or in another, except a
# `ppermute` that sends nothing.
IDENTITY_ON_ONE = _names("all_gather all_to_all pmax pmin ppermute psum reduce_scatter")
# If JAX tracks by type what varies, their transposes sum over the replicas.
CASTS = _names("pvary")
# Names in `jax.lax`, if they differ.
PUBLIC_NAMES = {
    "all_gather_invariant": "all_gather",
    "psum_invariant": "psum",
    "reduce_scatter": "psum_scatter",
}

# --- Positions -----------------------------------------------------------------------

# They take elements of the first operand, at positions from the other ones.
TAKING = _names("dynamic_slice gather")

# --- Which operands a result depends on ----------------------------------------------

# The k-th result is the k-th operand.
BARRIERS = _names("jdp_barrier optimization_barrier")
# The k-th result gets its gradient from the k-th operand alone.
ONE_TO_ONE = BARRIERS | _names(
    "all_gather jdp_with_transpose pmax pmin ppermute psum psum_invariant pvary sort"
)
# Real results whose derivative JAX takes to be zero.
ZERO_DERIVATIVE = _names("bitcast_convert_type ceil floor round sign")

# --- Where zeros lead ----------------------------------------------------------------

# The result is zero if the first operand is.
ZERO_WITH_FIRST = _names(
    "abs asin asinh atan atanh broadcast_in_dim cbrt conj convert_element_type copy "
    "cummax cummin cumsum device_put dynamic_slice erf expm1 imag log1p neg real "
    "reduce_max reduce_min reduce_precision reduce_scatter reduce_sum reshape rev sign "
    "sin sinh slice sqrt square squeeze stop_gradient tan tanh transpose"
)
# The k-th result is zero if the k-th operand is.
ZERO_WITH_EACH = BARRIERS | _names(
    "all_gather all_gather_invariant all_to_all jdp_replicated pmax pmin ppermute psum "
    "psum_invariant pvary"
)
# The result is zero if all operands are.
ZERO_WITH_ALL = _names("add add_any complex concatenate max min pad sub")

# --- Arithmetic ----------------------------------------------------------------------

CONTRACTIONS = _names("conv_general_dilated dot_general")
PRODUCTS = CONTRACTIONS | {"mul"}
# Factorizations of matrices, which take a time cubic in the side.
DECOMPOSITIONS = _names("cholesky eig eigh hessenberg lu qr schur svd triangular_solve")
# Operations that take most of the time of a backward pass.
HEAVY = CONTRACTIONS | KERNELS | _names("ragged_dot_general scan while")
ADDITIONS = _names("add add_any neg sub")
# These change the shape, not the order of elements.
RESHAPES = _names("reshape reshard sharding_constraint squeeze")
# The result of a sum is the sum of the results.
KEEPING_SUMS = RESHAPES | _names("broadcast_in_dim copy neg reduce_sum transpose")
# Elementwise operations that optimizers use.
ELEMENTWISE = ADDITIONS | _names(
    "abs acos acosh and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil "
    "clamp complex conj convert_element_type copy cos cosh digamma div eq erf erf_inv "
    "erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p "
    "log2 logistic lt max min mul ne nextafter not one_minus_square or "
    "population_count pow real reduce_precision rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient tan tanh xor"
)
# Reductions, and how the results of parts are combined.
REDUCTIONS: dict[str, Literal["sum", "max", "min"]] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    # For booleans; they are bitwise for integers.
    "reduce_or": "max",
    "reduce_and": "min",
}
# Nonlinear operations; all others count as linear. Each nonlinear transformation of
# optax has one of these.
NONLINEAR = _names(
    "abs acos argmax argmin asin atan atan2 cbrt ceil clamp cos cosh eq erf exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le log log1p log2 logistic lt max min ne "
    "not one_minus_square pow reduce_and reduce_max reduce_min reduce_or reduce_prod "
    "rem round rsqrt sign sin sort sqrt square tan tanh top_k while"
)
