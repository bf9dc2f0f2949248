# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Serves overlaid modules from the overlay tree, in place of or beside upstream's.

A module of which the patch set changes single expressions is loaded from upstream's
file, with these expressions changed (``edits``).

A module that upstream has too is put together from both files:

1. upstream's file runs under the private name ``<package>._upstream_<name>``, which
   the overlay file may import;
2. the overlay file runs under the public name;
3. names that only upstream has are copied into the public module;
4. in the private module, names that the overlay replaced are bound to the
   replacements, so that upstream code which stays in use calls them.

The finder is plain state of one process. A forked child inherits it; a spawned one
gets its own when vLLM runs the plugin there.
"""

import ast
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from importlib.abc import ExecutionLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import decode_source, find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from vllm_sparse_mla.guard import EditedFile, OverlaidFile

UPSTREAM_PREFIX = "_upstream_"


def overlay_root() -> Path:
    """Folder that holds the overlay's ``vllm/`` tree: package data, or a checkout.

    Raises:
        RuntimeError: if there is neither.
    """
    here = Path(__file__).resolve().parent
    for root in (here / "_overlay", here.parent):
        # With an __init__.py it is not the overlay but vLLM itself.
        if (root / "vllm").is_dir() and not (root / "vllm" / "__init__.py").exists():
            return root
    raise RuntimeError(
        f"no overlay tree beside {here}: install vllm-sparse-mla from its wheel, or "
        "with 'pip install -e' from a checkout"
    )


def upstream_name(module: str) -> str:
    """Private name of the upstream module that ``module`` replaces."""
    package, _, name = module.rpartition(".")
    return f"{package}.{UPSTREAM_PREFIX}{name}"


def _assigned_names(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def defined_names(source: str) -> set[str]:
    """Names that a module's source defines at its top level; imports are not counted.

    Bodies of top-level if, try, with and loop statements belong to the top level.
    """
    names: set[str] = set()
    pending = list(ast.parse(source).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(n for target in node.targets for n in _assigned_names(target))
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                names.update(_assigned_names(node.target))
        else:
            pending.extend(
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, ast.stmt | ast.ExceptHandler)
            )
    return {name for name in names if not name.startswith("__")}


def _join(module: ModuleType, upstream: ModuleType, defined: set[str]) -> None:
    """Lets each of two executed modules see the other's names (steps 3 and 4 above).

    ``defined`` are the names that either file defines.
    """
    ours, theirs = vars(module), vars(upstream)
    for name in defined & ours.keys() & theirs.keys():
        theirs[name] = ours[name]
    for name in theirs.keys() - ours.keys():
        if not name.startswith("__"):
            ours[name] = theirs[name]


class _ReplacingLoader(SourceFileLoader):
    """Loads an overlay file that replaces an upstream one."""

    def exec_module(self, module: ModuleType) -> None:
        private = upstream_name(module.__name__)
        upstream = importlib.import_module(private)
        try:
            super().exec_module(module)
            sources = (self.get_source(module.__name__), _source(upstream))
            _join(module, upstream, set().union(*map(defined_names, sources)))
        except BaseException:
            # A later attempt starts from the beginning.
            del sys.modules[private]
            raise


def _source(module: ModuleType) -> str:
    return module.__spec__.loader.get_source(module.__name__)


def _code_in(code: CodeType, name: str) -> CodeType:
    """Code of the class or function that ``code`` defines under a name."""
    return next(
        const
        for const in code.co_consts
        if isinstance(const, CodeType) and const.co_name == name
    )


class _EditingLoader(ExecutionLoader):
    """Loads upstream's file with edits.

    Unless the module keeps upstream's name (``guard.EditedFile``), no file lies where
    it says that it comes from, so whoever asks for its source (tracebacks, the CuTe
    DSL) gets the edited text from here. The name tells different texts apart for those
    that key a cache by it. No bytecode is stored: it would be taken for upstream's.
    """

    def __init__(self, name: str, path: Path, keeps_name: bool = False):
        # Now, while vLLM can still be left as it is.
        if find_spec("libcst") is None:
            raise ModuleNotFoundError(
                f"libcst, which edits {path}, is not installed: pip install libcst"
            )
        self._name = name
        self._path = path
        self._keeps_name = keeps_name

    @cached_property
    def _text(self) -> str:
        from vllm_sparse_mla.edits import EDITS, apply_edits

        text = decode_source(self._path.read_bytes())
        try:
            return apply_edits(text, EDITS[self._name])
        except ValueError as error:
            raise ImportError(
                f"{self._path}: {error}", name=self._name, path=str(self._path)
            ) from error

    def get_source(self, fullname: str) -> str:
        return self._text

    def edited_functions(
        self, module: ModuleType
    ) -> list[tuple[FunctionType, CodeType]]:
        """New code of each edited function of a module that was imported unedited.

        Their defaults and decorators are upstream's, which an edit leaves alone.
        """
        from vllm_sparse_mla.edits import EDITS

        compiled = compile(self._text, self._path, "exec")
        found = []
        for edit in EDITS[self._name]:
            names = edit.function.split(".")
            code = reduce(_code_in, names, compiled)
            found.append((reduce(getattr, names, module), code))
        return found

    def get_filename(self, fullname: str) -> str:
        if self._keeps_name:
            return str(self._path)
        digest = hashlib.sha256(self._text.encode()).hexdigest()
        return str(self._path.with_suffix(f".edited-{digest[:12]}.py"))


class OverlayFinder(MetaPathFinder):
    """Finds the overlaid modules, and upstream's under their private names.

    Attributes:
        files: what is overlaid.
    """

    def __init__(
        self,
        files: Sequence[OverlaidFile],
        root: Path,
        package_dir: Path,
        on_load: Callable[[], None],
    ):
        """Prepares the table of modules.

        Args:
            files: what to overlay.
            root: folder below which ``OverlaidFile.path`` lies.
            package_dir: folder of the installed package.
            on_load: called each time that a module of the overlay is looked up.

        Raises:
            FileNotFoundError: if the overlay tree lacks one of the files.
        """
        self.files = tuple(files)
        self._on_load = on_load
        self._loaders: dict[str, Loader] = {}
        for file in files:
            if isinstance(file, EditedFile):
                path = package_dir / file.path_in_package
                self._loaders[file.module] = _EditingLoader(
                    file.module, path, file.keeps_name
                )
                continue
            path = root / file.path
            if not path.is_file():
                raise FileNotFoundError(f"the overlay tree lacks {path}")
            if file.sha256 is None:
                self._add(SourceFileLoader, file.module, path)
                continue
            self._add(_ReplacingLoader, file.module, path)
            private = upstream_name(file.module)
            self._add(SourceFileLoader, private, package_dir / file.path_in_package)

    def _add(self, loader: type[SourceFileLoader], name: str, path: Path) -> None:
        self._loaders[name] = loader(name, str(path))

    def edited_functions(
        self, module: ModuleType
    ) -> list[tuple[FunctionType, CodeType]]:
        """See ``_EditingLoader``; for one of its modules."""
        return self._loaders[module.__name__].edited_functions(module)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """See ``importlib.abc.MetaPathFinder``; None for modules not overlaid.

        Raises:
            ImportError: if the module is to be reloaded (then ``target`` is given).
        """
        loader = self._loaders.get(fullname)
        if loader is None:
            return None
        if target is not None:
            # A class would derive from itself, and the other module keep the old names.
            raise ImportError(
                f"{fullname} is overlaid by vllm-sparse-mla and cannot be reloaded: "
                "start a new process",
                name=fullname,
            )
        self._on_load()
        return spec_from_file_location(fullname, loader=loader)


def active_finder() -> OverlayFinder | None:
    """The finder that is installed in this process, if any."""
    for finder in sys.meta_path:
        if isinstance(finder, OverlayFinder):
            return finder
    return None


def _globals_refer_to(module: ModuleType) -> set[str]:
    """Modules that a module has imported, or imported a class or function from."""
    names = set()
    for value in list(vars(module).values()):
        # Not isinstance, which runs code of an object that claims another class.
        if issubclass(type(value), ModuleType):
            names.add(value.__name__)
        elif issubclass(type(value), type | FunctionType):
            names.add(value.__module__)
    # A package has its modules as attributes, whoever imported them.
    return {name for name in names if not f"{name}.".startswith(f"{module.__name__}.")}


def _importer_outside(name: str) -> str | None:
    """Module outside ``name``'s package that imported ``name``, if it shows.

    The fewest steps decide; modules of the package may lie between. An import inside a
    function leaves no trace.
    """
    package = name.partition(".")[0]
    uses = {
        user: _globals_refer_to(module)
        for user, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
    }
    seen, reached = set(), {name}
    while reached:
        seen |= reached
        users = {user for user, used in uses.items() if used & reached} - seen
        for user in sorted(users):
            if user.partition(".")[0] != package:
                return user
        reached = users
    return None


def install(
    files: Sequence[OverlaidFile],
    root: Path,
    package_dir: Path,
    on_load: Callable[[], None],
) -> None:
    """Installs a finder for ``files``; either all of them are served or none.

    Plain Python that is edited and already imported is edited where it is. The
    arguments are those of ``OverlayFinder``.

    Raises:
        RuntimeError: if another of the modules is already imported.
        FileNotFoundError: if the overlay tree lacks one of the files.
    """
    finder = OverlayFinder(files, root, package_dir, on_load)
    late: list[tuple[FunctionType, CodeType]] = []
    for file in files:
        module = sys.modules.get(file.module)
        if module is not None and isinstance(file, EditedFile) and file.keeps_name:
            # On a GPU, the server's front imports it before vLLM calls plugins.
            late += finder.edited_functions(module)
        elif module is not None:
            importer = _importer_outside(file.module) or "unknown"
            raise RuntimeError(
                f"{file.module} is already imported from {module.__file__} (importer: "
                f"{importer}), too early to be replaced. Plugins are called in the "
                "order in which vLLM finds them; an import that waits until it is "
                "needed, or until after vllm_sparse_mla.plugin.register(), helps"
            )
    sys.meta_path.insert(0, finder)
    for function, code in late:
        function.__code__ = code
