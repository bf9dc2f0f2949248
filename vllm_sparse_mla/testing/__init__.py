# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What ``check``, tests, code generation and benchmarks set up; no server runs it."""
