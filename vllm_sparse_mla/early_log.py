# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Log lines that show even before vLLM has configured its logging.

vLLM runs plugins while it still parses its command line and sets up its loggers
afterwards; until then an INFO record goes nowhere.
"""

import logging
import os

import vllm.envs
from vllm.logger import init_logger

# vLLM configures the loggers below its own name, and no others.
_logger = init_logger("vllm.plugins.sparse_mla")


def _early_handler() -> logging.Handler:
    # Standard error, where Python too puts records that have no handler.
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter(
            "(pid=%(process)d) %(levelname)s %(asctime)s [%(name)s] %(message)s",
            datefmt="%m-%d %H:%M:%S",
        )
    )
    return handler


def log(level: int, message: str) -> None:
    """Logs through vLLM's logger or, if that has no handler yet, in its stead."""
    if _logger.hasHandlers() or not vllm.envs.VLLM_CONFIGURE_LOGGING:
        _logger.log(level, "%s", message)
    elif level >= logging.getLevelNamesMapping()[vllm.envs.VLLM_LOGGING_LEVEL]:
        record = _logger.makeRecord(_logger.name, level, __file__, 0, message, (), None)
        _early_handler().handle(record)


class OncePerProcess:
    """An INFO line that a process logs once; a forked child counts as a new one."""

    def __init__(self, message: str):
        self._message = message
        self._logged_in: int | None = None

    def __call__(self) -> None:
        """Logs the line, unless this process has done so."""
        if self._logged_in != os.getpid():
            self._logged_in = os.getpid()
            log(logging.INFO, self._message)
