"""What neither the schema nor a tag of an operation tells. Plain tables; each entry says how it is known."""

#: Namespaces whose operations are capturable unless a fact says otherwise.
CAPTURABLE_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "rngprims", "quantized", "quantized_decomposed", "profiler", "inductor"}
)

#: How operations begin that make or take quantised tensors, which on fakes look like any other.
QUANTISED = ("aten::quantize_", "aten::dequantize", "quantized::")

#: Namespaces of collective operations. Whether a backend can capture them is not known here, so they are breaks.
COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem", "_dtensor"})

#: Operations that wait for the device, or read from it, without a tag.
SYNCHRONISING = {
    # offs.tolist() in its body; chosen by transformers for expert weights that are not bf16
    "transformers::grouped_mm_fallback": "reads the expert offsets on the host",
    # reads the solver's info on the host to raise an error
    "aten::_linalg_check_errors": "reads the solver's status on the host",
    # their CUDA implementations run a solver that is driven from the host
    "aten::_linalg_eigh": "its solver is driven from the host",
    "aten::_linalg_svd": "its solver is driven from the host",
    "aten::linalg_eig": "its solver is driven from the host",
    "aten::linalg_lstsq": "its solver is driven from the host",
}

#: How functions begin that return nothing, dispatch nothing, and set no state either.
NO_STATE = ("check", "assert", "log_api_usage")

#: Operations that give a tensor the memory of another one. They act on the host; ``x.data = y`` is ``set_`` in a graph
#: up to torch 2.13, ``shallow_copy_data_`` since.
REPLACES_STORAGE = frozenset({"aten::set_", "aten::shallow_copy_data_"})

#: Operations that give an argument back where they have nothing to do; under fake tensors they make a copy instead.
MAY_GIVE_AN_ARGUMENT = frozenset(
    {
        *("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"),
        *("aten::native_dropout", "_c10d_functional::wait_tensor"),
    }
)

#: Tensor methods that end on the host on any device, also where fakes on a CPU show no copy.
HOST_METHODS = frozenset({"item", "tolist", "cpu", "numpy"})

#: Functions whose kernel is chosen at run time, by device and shape: whatever they dispatch, they count as one kernel,
#: so that a plan does not depend on the machine it was made on.
CHOSEN_AT_RUN_TIME = frozenset(
    {
        "scaled_dot_product_attention",
        "rms_norm",
        "multi_head_attention_forward",
        "lstm",
        "gru",
        "grouped_mm",
        "_grouped_mm",
    }
)

#: ATen operations whose kernels come from a library: no compiler fuses anything with them as long as it does not write
#: products itself.
PRODUCTS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv"),
        *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_int_mm"),
        *("aten::convolution", "aten::scaled_dot_product_attention"),
    }
)

#: ATen operations that compute nothing: they allocate, or only say something about a tensor.
NO_KERNEL = frozenset(
    {
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty"),
        *("aten::new_empty_strided", "aten::_unsafe_view", "aten::lift_fresh", "aten::alias", "aten::detach"),
        *("aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "prim::device"),
        *("aten::is_same_size", "aten::_assert_scalar", "aten::sym_constrain_range", "aten::resize_", "aten::set_"),
        *(
            "aten::sym_constrain_range_for_size",
            "aten::_local_scalar_dense",
            "aten::_assert_tensor_metadata",
            "aten::detach_",
        ),
    }
)

#: Higher-order operations that only wrap a graph: they run it, whatever the data.
WRAPPERS = frozenset(
    {
        *("wrap", "tag_activation_checkpoint", "wrap_activation_checkpoint", "invoke_subgraph", "hints_wrapper"),
        *("wrap_with_set_grad_enabled", "wrap_with_autocast", "strict_mode", "dynamo_bypassing_wrapper"),
    }
)

#: Higher-order operations that launch kernels and ask the host nothing.
CAPTURABLE_HIGHER_ORDER = frozenset(
    {"triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional", "flex_attention", "out_dtype"}
)

#: Packages whose functions stand in a graph as they are (``allow_in_graph``) and are known to be pure.
PURE_PACKAGES = frozenset({"torch", "operator", "_operator", "math", "builtins", "einops"})
