# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Entry point ``sparse_mla`` of vLLM's plugin group ``vllm.general_plugins``.

vLLM skips a plugin whose import fails, so this module imports nothing that can: all
checking is in the function.
"""


def register() -> None:
    """Puts the overlay in force in this process; further calls do nothing.

    A vLLM that the overlay is not made for stays as it is, with one warning.

    Raises:
        RuntimeError: if a module to be replaced is already imported; or, where
            VLLM_SPARSE_MLA_STRICT=1, if the overlay is not made for this vLLM.
        FileNotFoundError: if the overlay tree lacks one of its files.
        ValueError: if an environment variable of the project has no valid value.
    """
    import logging
    from pathlib import Path

    import vllm
    from vllm_sparse_mla import __version__, envs, guard, overlay
    from vllm_sparse_mla.early_log import OncePerProcess, log

    envs.register_with_vllm()
    if overlay.active_finder() is not None:
        return

    files = guard.enabled_files()
    package_dir = Path(vllm.__file__).parent
    mismatch = guard.find_mismatch(files, vllm.__version__, package_dir)
    if mismatch is not None:
        message = (
            f"vllm-sparse-mla {__version__} is made for vLLM {guard.VLLM_VERSION}, but "
            f"{mismatch}. vLLM is left stock: masked MHA runs as upstream has it. "
            f"Install vllm=={guard.VLLM_VERSION} (pip install --force-reinstall "
            f"--no-deps vllm=={guard.VLLM_VERSION}) or a vllm-sparse-mla made for "
            f"vLLM {vllm.__version__}; VLLM_SPARSE_MLA_STRICT=1 makes this an error."
        )
        if envs.strict():
            raise RuntimeError(message)
        log(logging.WARNING, message)
        return

    names = ", ".join(file.path_in_package for file in files)
    announce = OncePerProcess(
        f"vllm-sparse-mla {__version__} is active on vLLM {vllm.__version__}: {names}"
    )
    # A forked child does not run the plugin: it announces when it loads a module.
    overlay.install(files, overlay.overlay_root(), package_dir, on_load=announce)
    announce()
