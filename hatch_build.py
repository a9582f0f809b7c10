"""Compiles the scheduler's core, the mock GPU and the simulator's loop into the wheel.

mypyc makes C of the very same files, which it finds in pyproject.toml; they stay in the wheel beside what was made of
them. Where that cannot be done (no C compiler, no headers of Python, no mypyc) the wheel is interpreted: slower, with
equal results, and a line of the build says why. An editable install is never compiled: there an edited file would not
be the one that runs. HATCH_BUILD_NO_HOOKS=1 leaves it out too.
"""

import contextlib
import io
import os
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GROUP = "lorrery.compiled"
"""All that is compiled lies in one library, `lorrery/compiled__mypyc.*.so`, and each module's own one refers to it."""

OWN_CALLS = "-fvisibility=hidden"
"""What calls a function of the library means the library's own: 37,000 calls that no loader has to look up, and small
functions of mypyc's become part of their callers."""

NO_WARNINGS = "-Wno-all"
"""mypyc asks for `-Wall`; finding what there is to warn of takes twice as long as compiling."""

UNCOMPILED = "--follow-imports=silent"
"""The errors of modules that are not compiled do not count; their types do. Such modules import libraries that an
isolated build lacks, with whose types the C is the same."""

NUM_ERRORS = 3
"""Most errors of mypyc in the warning."""


class Compile(BuildHookInterface[Any]):
    """See the module. Its settings: patterns of the files to compile, `modules`, and of exceptions, `interpreted`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and put what comes of it into the wheel."""
        if version == "editable":
            return
        self.app.display_info(
            "lorrery: compiling the core with mypyc, one to two minutes on one core; HATCH_BUILD_NO_HOOKS=1 leaves it"
            " out: slower, with equal results"
        )
        made = Path(self.root) / "build" / "mypyc"
        shutil.rmtree(made, ignore_errors=True)
        try:
            self._compile(made)
        except (Exception, SystemExit) as error:  # setuptools may exit; whatever it is, the Python files are complete
            self.app.display_warning(f"lorrery: interpreted core, since it could not be compiled: {error}")
            return
        for library in (made / "lib").rglob("*.so"):
            build_data["force_include"][str(library)] = str(library.relative_to(made / "lib"))
        build_data["pure_python"], build_data["infer_tag"] = False, True

    def _compile(self, made: Path) -> None:
        # An interpreted build does not have these.
        from mypyc.build import mypycify
        from setuptools import Extension

        root = Path(self.root)
        modules, interpreted = (
            {path for pattern in self.config.get(name, []) for path in root.glob(pattern)}
            for name in ("modules", "interpreted")
        )
        files = [path for path in sorted(modules - interpreted) if path.name != "__init__.py"]
        probe = made / "probe.c"
        probe.parent.mkdir(parents=True)
        probe.write_text("#include <Python.h>\n", encoding="utf-8")
        _build([Extension("probe", [str(probe)])], made / "probe")  # finds in a second that there is no compiler
        os.chdir(root)  # mypy names modules from here
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                extensions = mypycify(
                    [
                        f"--cache-dir={made / 'cache'}",
                        UNCOMPILED,
                        *(str(path.relative_to(root)) for path in files),
                    ],
                    opt_level="1",  # as fast as 2 and 3 here, in two fifths of the compiler's time
                    debug_level="0",
                    group_name=GROUP,
                    target_dir=str(made / "c"),
                )
        except SystemExit as error:
            raise RuntimeError(_errors(said.getvalue()) or str(error)) from error
        if os.name == "posix":
            for extension in extensions:
                extension.extra_compile_args += [OWN_CALLS, NO_WARNINGS]
        _build(extensions, made)


def _errors(said: str) -> str:
    """Return the first errors among what mypyc printed, in one line, and how many there are more."""
    errors = [line for line in said.splitlines() if ": error: " in line]
    left_out = [f"and {len(errors) - NUM_ERRORS} more errors"] * (len(errors) > NUM_ERRORS)
    return "; ".join([*errors[:NUM_ERRORS], *left_out])


def _build(extensions: list[Any], made: Path) -> None:
    """Make libraries of C files, under `made`/lib."""
    from setuptools import Distribution

    command = Distribution({"name": "lorrery", "ext_modules": extensions}).get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(made / "lib"), str(made / "objects")
    command.parallel = os.cpu_count()  # the one large library takes as long as all the small ones
    command.ensure_finalized()
    command.run()
