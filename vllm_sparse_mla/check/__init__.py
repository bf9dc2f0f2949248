# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command ``vllm-sparse-mla check`` and the parts that it is made of.

``environment`` prepares the process and reports on it, ``steps`` runs vLLM's
scheduler and metadata builder, ``prefill`` sends each step through the overlaid layer
and judges the result, ``stand_ins`` replaces what a machine without a GPU lacks,
``codegen_report`` judges the compiled callbacks, ``render`` prints.
"""
