"""Plug-ins of inference engines: the layers with tuned rows use them, all others keep the engine's own kernels.

`scope`: what the user allows, and the line at start with what is taken over. `tuned_products`: rows of a layer, and the
digest of all tables. `engine_dispatch`, `engine_experts`: dispatch per M with the engine's kernel where no row answers.
`operators`: the same as operators for compiled graphs. `vllm`, `vllm_...`: vLLM's plug-in.
"""
