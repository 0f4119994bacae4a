"""Everything of torch that has no public name, one small module for each part, so that a new torch breaks in one place.

``fake``     fake tensors: the tracing mode, fresh fakes, storage identity
``new_sizes`` sizes in the fakes of break functions that only their bodies know
``dynamo``   what Dynamo leaves on a graph: sources, module paths, source lines, its counters, the compiled owner
``addresses`` addresses of many tensors at once, the current stream's handle
``backends`` choices of the process that kernels depend on
``cuda_graphs`` what a failed capture leaves undone, which streams take part in one
``ops``      the registry of operators
``dynamo_log`` what Dynamo logs and counts about code that it did not compile
``functorch`` the stack of transforms
``recorder`` the dispatch mode that records ATen operations
``pytree``   classes that torch takes apart

Run on torch 2.11.0, 2.13.0 and 2.14.1.
"""
