# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build: adds the overlay tree to the wheel as data of ``vllm_sparse_mla``."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithOverlay(build_py):
    """Copies top-level ``vllm/`` to ``vllm_sparse_mla/_overlay/vllm/``.

    The tree must not be installed as the package ``vllm``, which it overlays. An
    editable install reads it where it is.
    """

    def _overlay(self) -> dict[str, str]:
        """Source file of each file to be built, both relative."""
        base = Path(self.build_lib, "vllm_sparse_mla", "_overlay")
        return {str(base / path): str(path) for path in Path("vllm").rglob("*.py")}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for target, source in self._overlay().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else outputs + list(self._overlay())

    def get_output_mapping(self) -> dict[str, str]:
        mapping = super().get_output_mapping()
        return mapping if self.editable_mode else mapping | self._overlay()

    def get_source_files(self) -> list[str]:
        return super().get_source_files() + sorted(self._overlay().values())


setup(cmdclass={"build_py": BuildWithOverlay})
