# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Entry point ``sparse_mla`` of vLLM's plugin group ``vllm.general_plugins``.

vLLM skips a plugin whose import fails, but not one whose function raises: that ends the
server, whatever its model. So this module imports nothing that can fail, and all that
can go wrong in the function leaves vLLM as it was.
"""

import logging
from collections.abc import Callable


def register() -> None:
    """Puts the overlay in force in this process; further calls do nothing.

    Where that cannot be done, vLLM stays as it is, with one warning: another vLLM, a
    module to be replaced that is already imported, an environment variable without a
    valid value, or whatever else stands in the way.

    Raises:
        Exception: what the warning would say, where VLLM_SPARSE_MLA_STRICT=1.
    """
    from vllm_sparse_mla import __version__, envs

    try:
        announce = _install()
    except Exception as error:
        if envs.strict():
            raise
        # Python shows warnings even before vLLM has set up its loggers.
        logging.getLogger("vllm.plugins.sparse_mla").warning(
            "vllm-sparse-mla %s: %s. vLLM is left stock: masked MHA runs as upstream "
            "has it. VLLM_SPARSE_MLA_STRICT=1 makes this an error.",
            __version__,
            str(error).removesuffix(".") or repr(error),
        )
    else:
        announce()


def _install() -> Callable[[], None]:
    """Installs the overlay's finder, unless it is there.

    Returns what announces it, once in each process.
    """
    from pathlib import Path

    import vllm
    from vllm_sparse_mla import __version__, envs, guard, overlay
    from vllm_sparse_mla.early_log import OncePerProcess

    envs.register_with_vllm()
    if overlay.active_finder() is not None:
        return lambda: None
    envs.check()
    package_dir = Path(vllm.__file__).parent
    guard.check_installed(vllm.__version__, package_dir)
    files = guard.enabled_files()
    names = ", ".join(file.path_in_package for file in files)
    announce = OncePerProcess(
        f"vllm-sparse-mla {__version__} is active on vLLM {vllm.__version__}: {names}"
    )
    # A forked child does not run the plugin: it announces when it loads a module.
    overlay.install(files, overlay.overlay_root(), package_dir, on_load=announce)
    return announce
