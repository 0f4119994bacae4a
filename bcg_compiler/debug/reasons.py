"""What the reason codes mean, in words, and what would remove each break or eager run."""

from collections.abc import Iterable
from typing import NamedTuple

from bcg_compiler.distributed.rules import PARALLEL_RULES
from bcg_compiler.plan import Plan, StepReason


class Meaning(NamedTuple):
    """``why`` something runs eagerly, and the ``remedy``."""

    why: str
    remedy: str


#: Why an operation is outside of segments.
BREAKS = {
    "eager_break": Meaning(
        "declared a break",
        "Nothing needs to be done: this is a break because the code says so (@eager_break or call_with_break).",
    ),
    "attention": Meaning(
        "attention over live metadata",
        'Nothing, if it is declared: it reads lengths and page tables. Else drop it from options={"mark": [...]}.',
    ),
    "dsa_indexer": Meaning(
        "the indexer of sparse attention",
        'Nothing, if it is declared: it reads lengths and page tables. Else drop it from options={"mark": [...]}.',
    ),
    "logits_gate": Meaning(
        "the weights of the indexer's heads",
        'Nothing: it joins the break of the indexer beside it. Without that, drop it from options={"mark": [...]}.',
    ),
    "a2a_moe": Meaning(
        "experts on several ranks",
        "Nothing: how many tokens go to which rank is read on the host.",
    ),
    "cp_gather_tail": Meaning(
        "works on the gathered rows of all context-parallel ranks",
        "Nothing: how many rows the whole batch has, no bucket says.",
    ),
    "mla_bmm": Meaning(
        "a lone matmul between the breaks of indexer and attention",
        "Nothing needs to be done: it is cheaper there than as a graph of its own.",
    ),
    "plan_argument": Meaning(
        "its plan depends on what the graph computes",
        "Let the plan read what it needs from the forward context (bcg.current_context()).",
    ),
    "plan_padded_rows": Meaning(
        "its body may leave padded rows unwritten, and inside of a segment nobody clears them",
        "Let the body write every row, and declare writes_every_row=True.",
    ),
    "user_rule": Meaning(
        "named by a rule of yours",
        'Drop the rule from options={"breaks": [...]}.',
    ),
    "host_sync": Meaning(
        "the host waits for a value from the device",
        "Keep the value on the device (torch.where, a tensor as an index), or read it before the forward.",
    ),
    "dynamic_output": Meaning(
        "the size of a result depends on data",
        "Use a form of fixed size: a mask with torch.where instead of x[mask], top-k instead of nonzero, "
        "repeat_interleave with output_size=.",
    ),
    "host_number": Meaning(
        "a number that changes between calls would be frozen",
        "Make the number a tensor on the device, or keep it the same from call to call.",
    ),
    "cpu_compute": Meaning(
        "works on the CPU",
        "Create the tensor on the device of the model (device=x.device), or make it once, outside of the forward.",
    ),
    "unsafe_tag": Meaning(
        "its author says that no CUDA graph may hold it",
        'If the tag is wrong, name the op in options={"capturable": [...]}.',
    ),
    "unknown_op": Meaning(
        "its body cannot be seen",
        'If it neither synchronises nor reads sizes or state on the host, name it in options={"capturable": [...]}.',
    ),
    "collective": Meaning(
        "talks to other ranks",
        'If its backend can be captured (NCCL can), name it in options={"capturable": [...]}.',
    ),
    "control_flow": Meaning(
        "the host chooses what runs",
        "Compute both branches and choose with torch.where.",
    ),
    "side_stream": Meaning(
        "orders work on several streams",
        'If nothing outside of the model uses those streams, options={"dual_stream": True} captures them.',
    ),
    "capture_failed": Meaning("a capture with it fails", "See what the error says."),
    "small_segment": Meaning(
        "too few kernels between two breaks to be worth a graph",
        'Remove a break beside it, or lower options={"min_segment_kernels": ...}.',
    ),
}

#: Why a whole program ran without replay.
EAGER_RUNS = {
    "warm_up": Meaning("the first call of a shape runs eagerly, the second is captured", ""),
    "capture_off": Meaning("capture is off, so the steps run one after the other", ""),
    "capture_limit": Meaning("max_captures were made already", 'Raise options={"max_captures": ...}.'),
    "no_segment": Meaning("nothing of the graph can be captured", ""),
    "input_overlap": Meaning("an input that the model writes shares memory with another one", "Pass a copy."),
    "busy": Meaning("they were called while another call of theirs ran", ""),
    "odd_input": Meaning("an input is conjugated lazily, sparse, quantized, or of a torch.func transform", ""),
    "outer_capture": Meaning("they were called while the caller captured a CUDA graph", ""),
    "out_of_memory": Meaning("a capture ran out of memory", ""),
    "capture_failed": Meaning("a capture failed, and no one operation is to blame", ""),
    "break_alias": Meaning("a break returns a view of what it was given, and a segment reads it", "Return a copy."),
    "reshaped_in_place": Meaning("the shape of a value that several steps use is changed in place", ""),
    "input_storage": Meaning("the graph addresses the storage behind an input", ""),
    "unknown_state": Meaning("the graph sets state that a replay would not set", ""),
    "grad": Meaning(
        "gradients were wanted, so the graph was not split",
        "Call the model under torch.inference_mode() or torch.no_grad().",
    ),
    "no_bucket": Meaning("there is no bucket to replay in", "Capture at least one."),
    "few_rows": Meaning("so few live rows that the program may be wrong for them", "Make larger batches."),
    "too_long": Meaning("more live rows than the last bucket holds", "Give a ladder with a higher ceiling."),
    "padding": Meaning(
        "the smallest bucket that holds the live rows is too many times as large",
        "Give a ladder with a bucket between, or raise max_padding_factor.",
    ),
    "cp_capacity": Meaning(
        "no bucket within the padding factor has captured room for the rows of the longest context-parallel rank, or "
        "nobody says how many these are",
        "Give a ladder with a bucket between, raise max_padding_factor, or say it.",
    ),
    "requests": Meaning("more requests than were captured, or nobody says how many", "Capture more, or say it."),
    "prefix_chunks": Meaning(
        "more chunks of prefix than were captured, or nobody says how many", "Capture more, or say it."
    ),
    "prefix": Meaning("a request has a prefix, or may have one, and none was captured", "Say that there is none."),
    "embeddings": Meaning("embeddings are given or replaced, or may be, as was not captured", "Say which it is."),
    "adapter": Meaning("an adapter is used, or may be, that was not captured", "Say which ones are used."),
    "target_verify": Meaning("it verifies a draft, or may, and that was not captured", "Say that it does not."),
    "hidden_states": Meaning(
        "more hidden states are wanted, or may be, than were captured", "Capture more, or say which."
    ),
    "logprobs": Meaning(
        "log-probabilities are wanted, or may be, and no eager tail computes them", "Say that they are not."
    ),
    "veto": Meaning("a veto of yours speaks against it", "See what it returned."),
    "late_capture": Meaning(
        "bcg.capture had captured all there was, and they need another capture",
        'Capture again, or set options={"on_late_capture": "capture"}.',
    ),
    "no_ladder": Meaning(
        "the program captures exact shapes",
        'Compile with options={"ladder": ...}; where that is given, bcg explain says why it is not used.',
    ),
    "not_compiled": Meaning("the model has not run yet", "Call it once."),
    "no_program": Meaning("a rank has no program that could replay", "Compile and capture the model on all ranks."),
    "other_mode": Meaning("a rank has a batch for decoding", "Give all ranks batches of one kind."),
    **{rule.code: Meaning("the layout of ranks speaks against it", rule.remedy) for rule in PARALLEL_RULES},
}

#: Why a unit of a segment is not compiled, and its operations run as they are.
EAGER_UNITS = {
    "unit_mode": Meaning(
        "it is in an autocast, inference or grad region of the graph's own", "Open the region around the call."
    ),
    "unit_random": Meaning("it draws random numbers, and compiled code draws other ones", ""),
    "unit_opaque": Meaning("it holds an operation whose body cannot be seen", ""),
    "unit_alias": Meaning(
        "two of its inputs, or of its results, share memory that is written",
        "Write into a copy, or return a new tensor.",
    ),
    "unit_reshapes": Meaning("the shape of a value that it is given is changed in place", "Use a view instead."),
    "unit_storage": Meaning("the graph addresses the storage behind a value that it is given, or gives", ""),
    "unit_odd_input": Meaning(
        "it is given a value that is conjugated or negated lazily, sparse, quantized, of a subclass, or expanded",
        "Call resolve_conj() or resolve_neg() where the value is made.",
    ),
    "unit_sizes": Meaning(
        "it was compiled after the first call, and the compiler assumed something of open sizes that nobody checks", ""
    ),
    "no_compiler": Meaning("there is nothing to compile with", "install what the warning names: g++, or Triton"),
    "compile_failed": Meaning("the compiler failed; a warning says how", ""),
    "specialize_failed": Meaning(
        "the compiler failed for the sizes of one bucket, which runs the code of the others; a warning says how",
        'Leave it out of options={"specialized_buckets": ...}.',
    ),
    "unit_capture_failed": Meaning("its compiled code could not be captured, and its operations could", ""),
}

#: Why a graph is not padded to the ladder: its exact shapes are captured.
UNPADDED = {
    "no_token_dim": Meaning(
        "no size that the graph leaves open is the number of tokens",
        "Mark the dimension of tokens, torch._dynamo.mark_dynamic(input_ids, 1), or 0 where tokens are flattened; or "
        'name it in options={"token_dim": ...}. A prompt of one '
        "token, and a model that makes a constant of the number, are compiled for one length only.",
    ),
    "held_rows": Meaning(
        "a tensor that the caller does not give has as many rows", "Make it an input, or compute it in the forward."
    ),
    "mixing_rows": Meaning(
        "live rows may depend on padded ones",
        'If you know that none does, set options={"assume_rows_independent": True}.',
    ),
    "rows_returned": Meaning("the number of rows is a result", "Read it from the size of another result."),
    "input_returned": Meaning(
        "a result is a view of an input, of which a padded program has a copy", "Return a copy of it."
    ),
    "open_number": Meaning(
        "the size of a tensor depends on a number that is no size of an input", "Compute it from sizes of inputs."
    ),
    "unclear_tail": Meaning(
        "a break writes what may be memory of the caller's, whose padded rows nobody may clear",
        "Give the break a tensor that the forward makes, or declare writes_every_row=True.",
    ),
    "ambiguous_tokens": Meaning(
        "several sizes of the inputs are open, and any of them could be the number of tokens",
        'Name it: options={"token_dim": "input_ids:1"}.',
    ),
    "tied_sizes": Meaning(
        "another open size of the inputs is bound to the number of tokens",
        "Leave the other one closed (torch._dynamo.mark_static), or give inputs that need no second one.",
    ),
    "unknown_layout": Meaning(
        "under assume_rows_independent: which rows of a result are live is not shown",
        "Return it with the rows in a dimension of their own.",
    ),
}


#: What removes the break at an op of somebody else's.
OPS = {
    "transformers::grouped_mm_fallback": "transformers takes it for expert weights that are not bfloat16. Use "
    'bfloat16, or set experts_implementation="batched_mm" in the configuration.',
}


def reasons_of(plan: Plan) -> list[StepReason]:
    """Why the breaks of a plan are breaks, and why it is not padded, if it was to be."""
    found = [reason for step in plan.breaks for reason in step.reasons]
    if plan.unpadded is not None:
        code, text = plan.unpadded.code, plan.unpadded.text
        mixing = next((rows for rows in plan.rows if rows.kind == "mixing" and rows.text in text), None)
        place = (mixing.ordinal, mixing.op, mixing.module, mixing.source) if mixing else (-1, "the graph", "", None)
        found.append(StepReason(code, text, *place))
    return found


def remedies(reasons: Iterable[StepReason]) -> list[str]:
    """What would remove these breaks, or let a graph be padded, each remedy once."""
    found = (OPS.get(reason.op) or meaning(reason.code).remedy for reason in reasons)
    return [remedy for remedy in dict.fromkeys(found) if remedy]


def meaning(code: str) -> Meaning:
    """What the reason code of a break, or of a graph that is not padded, means; an unknown one stands for itself."""
    return BREAKS.get(code) or UNPADDED.get(code) or _unknown(code)


def meaning_of_eager_run(code: str) -> Meaning:
    """What the reason code of an eager run means, also where that is the reason of a break."""
    return EAGER_RUNS.get(code) or meaning(code)


def _unknown(code: str) -> Meaning:
    return Meaning(code.replace("_", " "), "")
