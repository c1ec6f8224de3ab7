# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm doctor --selftest`: is this GPU served right, and how fast, in a few minutes.

The stages are processes of their own, so that a crash or a hang of one is a result,
too: `kernels` checks every kernel configuration that this GPU uses against float64,
`model` draws a tiny GLM-5 and computes its log-probabilities in float32, `engine`
serves it (float16 and bfloat16) and compares, and then, alone on the GPU, `timing`
measures the kernels, and `rates` what the GPU reaches at its best. They report events
(`child`); `report` makes the verdict.
"""
