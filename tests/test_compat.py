import subprocess
import sys
import textwrap
from pathlib import Path

# What torchvision does while it is imported, and what fails there when its compiled part is not loaded. The last line
# fails when a submodule is left over from a first attempt.
MISMATCHED = """
import torch
import torchvision.extension
torch.library.register_fake("torchvision::nms")(lambda *args: None)
torchvision.extension
"""


def run(code: str) -> str:
    """Run code in a new interpreter, where nothing has been imported yet."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake(folder: Path, code: str) -> Path:
    """A package called torchvision that runs the given code on import."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "extension.py").touch()
    return folder


def test_installed_torchvision_imports_once_for_all_threads() -> None:
    code = """
        from concurrent.futures import ThreadPoolExecutor
        from relprop.compat import import_torchvision
        with ThreadPoolExecutor(4) as pool:
            found = [job.result() for job in [pool.submit(import_torchvision) for _ in range(4)]]
        import torchvision
        assert all(module is torchvision for module in found)
        assert import_torchvision() is torchvision
        import torch
        with torch.no_grad():
            print(tuple(torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32)).shape))
    """
    assert run(code) == "(1, 1000)"


def test_a_failed_import_before_does_no_harm() -> None:
    code = """
        import contextlib
        with contextlib.suppress(RuntimeError):
            import torchvision
        from relprop.compat import import_torchvision
        print(import_torchvision().models.resnet18.__name__)
        import zennit.torchvision
    """
    assert run(code) == "resnet18"


def test_mismatched_build_is_repaired_whatever_is_installed(tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(fake(tmp_path, MISMATCHED))!r})
        from relprop.compat import import_torchvision
        module = import_torchvision()
        assert module is import_torchvision()
        print(module.__file__)
    """
    assert run(code) == str(tmp_path / "torchvision" / "__init__.py")


def test_absent_torchvision_stays_an_import_error() -> None:
    code = """
        import sys
        sys.modules["torchvision"] = None  # as if it were not installed
        from relprop.compat import import_torchvision
        try:
            import_torchvision()
        except ImportError as error:
            print(error.name)
    """
    assert run(code) == "torchvision"


def test_another_error_is_passed_on_and_nothing_declared(tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(fake(tmp_path, 'raise RuntimeError("disk on fire")'))!r})
        from relprop import compat
        try:
            compat.import_torchvision()
        except RuntimeError as error:
            print(error, compat._declared)
    """
    assert run(code) == "disk on fire []"


def test_relprop_itself_never_imports_torchvision() -> None:
    code = """
        import sys
        import relprop
        print([name for name in sys.modules if name.startswith("torchvision")])
    """
    assert run(code) == "[]"
