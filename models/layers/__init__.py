"""The parts of the serving models: flattened tokens over a paged cache.

====================  ==================================================================================
``batch``             what differs from batch to batch, published to break bodies: lengths, pages, slots
``pages``             which pages of the cache belong to which request
``cache``             tensors of pages: made, written, read
``attention``         the attention breaks: grouped-query, absorbed MLA, MLA over chosen tokens
``indexer``           DSA: the keys that choose tokens, and the break that does
``mla``               multi-head latent attention in absorbed form, with or without an indexer
``moe``               router, routed experts (one break), shared experts
``rotary``            rotary positions, YaRN included
``basic``             embedding, linear, norm, gated MLP
``kernels``           which implementation of an operation is in use, by name
``reference``         those in plain torch
``flashinfer``        those of FlashInfer
``sparse``            MLA over chosen tokens that reads only those
``fp8``               rows of 8 bits with a scale each, in one cache of bytes
``index_logits``      index scores over such rows by a Triton kernel, which is ``index_kernel``
``planned``           attention whose plan runs once for all layers, and whose run is captured
``checkpoint``        weights of a Hugging Face folder into a model
====================  ==================================================================================
"""
