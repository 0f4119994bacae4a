"""The plan: what runs in which order and why, as pure data.

``plan``       the dataclasses
``partition``  units of work → steps: joins breaks, moves pure nodes, absorbs small segments
``build``      an annotated graph → a plan
``units``      the parts of segments that are compiled apart
``lifetimes``  from when to when storages and bridges are needed
``structure``  the structural key of a segment, by which equal ones are found
``text``       the stable text, the hash, JSON
``sizes``      sizes as numbers

``memory``     how many bytes the captures of a plan take; ``allocator`` simulates the allocator that they use

``padding``    how the ladder is used, or why not; ``padded_rows`` what it asks of breaks and results
``rules``      what of a configuration does not go together
"""

from bcg_compiler.plan.build import build_plan
from bcg_compiler.plan.plan import CompileUnit, Padding, Plan, PlanNode, Slot, Step, StepReason, Value
from bcg_compiler.plan.text import plan_from_json, plan_hash, plan_text, plan_to_json

__all__ = [
    "CompileUnit",
    "Padding",
    "Plan",
    "PlanNode",
    "Slot",
    "Step",
    "StepReason",
    "Value",
    "build_plan",
    "plan_from_json",
    "plan_hash",
    "plan_text",
    "plan_to_json",
]
