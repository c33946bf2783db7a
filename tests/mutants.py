"""Takes the guards against the historical faults out, one at a time, and reports that the faults' tests fail.

A test of a guard proves something only if it fails without the guard. In a copy of the tree this script first runs the
tests of the faults, which must pass; then, for each mutant, changes one place, builds, and runs that fault's tests,
which must fail. Three kinds: ``guard`` takes the check out that stops a fault, ``switch`` takes the fault itself out,
so that there is nothing to stop, ``quiet`` breaks the engine where no generated token tells of it: drafts are accepted
less often, or text loses a space. A mutant that does not compile, or whose text is no longer there, is an error.

    python tests/mutants.py [--only 27338] [--only quiet] [--target-dir DIR]

Exit status 0 if every mutant was noticed. Needs cargo, and pytest with torch for what the Python tests notice.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = {  # prefixes of filters for pytest, and the files that they are for
    "python": "tests/python/faults/test_faults.py",
    "drafts": "tests/python/engine/test_drafts.py",
    "text": "tests/python/engine/test_output_text.py",
    "trained": "tests/python/train/test_head.py",
    "blocks_trained": "tests/python/train/test_block_head.py",
    "blocks": "tests/python/models/test_block_heads.py",
    "block_rounds": "tests/python/engine/test_blocks.py",
}


@dataclass(frozen=True)
class Mutant:
    """One change: ``old``, which ``file`` has exactly once, becomes ``new``; ``test`` must then fail."""

    fault: int | str  # number of the fault, or "quiet"
    kind: str  # guard, switch or quiet
    what: str
    file: str
    old: str
    new: str
    test: str  # a filter of `cargo test --test faults`, or of `pytest -k` with a prefix of PYTHON


MUTANTS = [
    Mutant(27338, "guard", "capacity of a line is not compared", "src/plan/arrays.rs",
           "(Extent::Line(n), have) if n > have.elements() =>",
           "(Extent::Line(n), have) if n > have.elements() && false =>", "branch_width"),
    Mutant(27338, "switch", "width keeps its topk", "src/geometry/capacity.rs",
           "if self.reverts.has(Fault::BranchWidth) {", "if self.reverts.has(Fault::BranchWidth) && false {",
           "branch_width"),
    Mutant(27360, "guard", "pages of a row are not compared with its columns", "src/plan/write/table.rs",
           "if n > self.cols {", "if n > self.cols && false {", "expand_table"),
    Mutant(27360, "switch", "live tokens alone", "src/geometry/paged.rs",
           "if self.reverts().has(Fault::ExpandTable) {", "if self.reverts().has(Fault::ExpandTable) && false {",
           "expand_table"),
    Mutant(23037, "guard", "dead queries are not read back", "src/plan/write/planner.rs",
           "if plan.is_padded() {\n        audit::check_padding",
           "if plan.is_padded() && false {\n        audit::check_padding", "stale_padding"),
    Mutant(23037, "guard", "queries behind the last live one are not looked for", "src/plan/audit.rs",
           "let behind = usize::from(matches!(plan.phase, Phase::Extend | Phase::Verify));",
           "let behind = usize::from(false);", "stale_padding::stale_requests"),
    Mutant(23037, "guard", "the lease on an output is not compared", "src/py/plan/buffers.rs",
           "if held == current {", "if held == current || true {", "python:23037_held or 23037_without"),
    Mutant(23037, "switch", "padding is written", "src/plan/write/planner.rs",
           "if geometry.reverts().has(Fault::StalePadding) &&",
           "if geometry.reverts().has(Fault::StalePadding) && false &&", "stale_padding"),
    Mutant(26972, "guard", "positions are not compared with the allocation", "src/plan/write/place.rs",
           "if end > u64::from(self.limit) {", "if end > u64::from(self.limit) && false {", "holey_reserve"),
    Mutant(26972, "switch", "the reserve has its holey term", "src/geometry/capacity.rs",
           "Layout::Holey if reverts.has(Fault::HoleyReserve) =>",
           "Layout::Holey if reverts.has(Fault::HoleyReserve) && false =>", "holey_reserve"),
    Mutant(26738, "guard", "absent host lengths are given out as none", "src/plan/lens.rs",
           "Lens::Device { batch, at_most } => Err(Error::Invalid {",
           "Lens::Device { .. } => Ok(&[]),\n            #[allow(unreachable_patterns)]\n"
           "            Lens::Device { batch, at_most } => Err(Error::Invalid {", "host_lengths"),
    Mutant(26738, "switch", "sizes come from the bound", "src/plan/load.rs",
           "Lens::Device { .. } if geometry.reverts().has(Fault::HostLengths) =>",
           "Lens::Device { .. } if geometry.reverts().has(Fault::HostLengths) && false =>", "host_lengths"),
    Mutant("quiet", "quiet", "the head turns by the target's angles", "python/specrs/models/eagle3.py",
           "*rope_tables(config.rope, config.head_dim,", "*rope_tables(target.config.rope, config.head_dim,",
           "drafts:every_shape"),
    Mutant("quiet", "quiet", "accepted rows are taken for neighbours", "python/specrs/models/features.py",
           "if all(row == first + i for i, row in enumerate(self.rows)):", "if first >= 0:", "drafts:first_branch"),
    Mutant("quiet", "quiet", "copy-on-write leaves the draft cache out", "python/specrs/engine/devices/host.py",
           "if self.drafts is not None:", "if False:", "drafts:copied_whole"),
    Mutant("quiet", "quiet", "the head's results are borrowed for ever", "python/specrs/engine/devices/host.py",
           "if request.head.root is root:", "if False:",
           "drafts:join_and_leave"),
    Mutant("quiet", "quiet", "a block's first row predicts where it does not", "python/specrs/models/block_config.py",
           'form.anchor)', 'not form.anchor)', "blocks:trained"),
    Mutant("quiet", "quiet", "outputs of layers are taken for inputs", "python/specrs/models/head_forms.py",
           '("target_layer_ids", "dflash_config", 1)', '("target_layer_ids", "dflash_config", 0)', "blocks:trained"),
    Mutant("quiet", "quiet", "a block's context is not normalised", "python/specrs/models/block_head.py",
           'self.dense.rms_norm(w["x"], self._context_norm, self._eps, w["n"])', 'w["n"].copy_(w["x"])',
           "blocks:trained"),
    Mutant("quiet", "quiet", "masks are fed as the last token", "python/specrs/models/block_head.py",
           "return [token] + [self.config.mask_token]", "return [token] + [token]", "blocks:trained"),
    Mutant("quiet", "quiet", "the Markov head's states do not follow the beams", "python/specrs/models/path_heads.py",
           "state.take_along_dim(parents[:, :, None], 1)", "state.take_along_dim(0 * parents[:, :, None], 1)",
           "blocks:biases"),
    Mutant("quiet", "quiet", "a block's convolutions read the block before", "python/specrs/models/dense.py",
           "(places < tap)", "(places < 0)", "blocks:trained"),
    Mutant("quiet", "quiet", "inputs and outputs are convolved the other way round",
           "python/specrs/models/block_conv.py", "self._base[0], factors, 0,",
           "self._base[1], factors, 1,", "blocks:trained"),
    Mutant("quiet", "quiet", "a selector does not look at the block", "python/specrs/models/path_heads.py",
           "before * row[:, None]", "before", "blocks:biases"),
    Mutant("quiet", "quiet", "a selector's block scores all tokens", "python/specrs/engine/devices/host_blocks.py",
           "logits < least", "logits < -math.inf", "block_rounds:depend_on_the_path"),
    Mutant("quiet", "quiet", "the detokenizer knows no prompt", "python/specrs/engine/request/decoding.py",
           "for token in self._end_of(prompt):", "for token in ():", "text:behind_a_prompt"),
    Mutant("quiet", "quiet", "a chain in training sees keys of its own text", "python/specrs/train/eagle3.py",
           "mask = same & (gap >= j)", "mask = same & (gap >= 0)", "trained:drafts_of_the_engine"),
    Mutant("quiet", "quiet", "pieces in training see each other", "python/specrs/train/eagle3.py",
           "same = pieces[:, :, None] == pieces[:, None, :]", "same = pieces[:, :, None] >= pieces[:, None, :]",
           "trained:see_each_other"),
    Mutant("quiet", "quiet", "a head learns the token that it is given", "python/specrs/train/teacher.py",
           "torch.cat(wanted).roll(-1, 0)", "torch.cat(wanted)", "trained:served_model"),
    Mutant("quiet", "quiet", "blocks in training see the text that they draft", "python/specrs/train/block.py",
           "behind = same & (places <= anchors[:, :, None])", "behind = same", "blocks_trained:drafts_of_the_engine"),
    Mutant("quiet", "quiet", "a block in training counts answers of the next piece", "python/specrs/train/block.py",
           "(pieces[at + 1] == pieces[begins])", "(pieces[at + 1] >= 0)", "blocks_trained:within_the_piece"),
]  # fmt: skip


class Tree:
    """A copy of the sources, to change and build."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root = root
        self.env = os.environ | {
            "CARGO_TARGET_DIR": str(target),
            "CARGO_INCREMENTAL": "1",
            "CARGO_PROFILE_TEST_OPT_LEVEL": "0",  # built often, run briefly
            "PYO3_PYTHON": sys.executable,
            "PYTHONPATH": str(root / "python"),
            "SPECRS_NO_CUDA": "1",
        }
        self.env.pop("SPECRS_DEBUG_REVERT", None)
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, root / name)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, cwd=self.root, env=self.env, capture_output=True, text=True, check=False)

    def build(self, test: str) -> None:
        if test.partition(":")[0] in PYTHON:
            done = self.run("cargo", "build", "--quiet", "--lib", "--features", "python")
            module = (
                "specrs.dll"
                if sys.platform == "win32"
                else f"libspecrs.{'dylib' if sys.platform == 'darwin' else 'so'}"
            )
            if done.returncode == 0:
                shutil.copy(
                    Path(self.env["CARGO_TARGET_DIR"]) / "debug" / module, self.root / "python/specrs/_specrs.abi3.so"
                )
        else:
            done = self.run("cargo", "test", "--quiet", "--test", "faults", "--no-run")
        if done.returncode != 0:
            raise SystemExit(f"does not build:\n{done.stderr}")

    def failures(self, test: str) -> list[str] | None:
        """Tests that fail of those that ``test`` names; ``None`` if it names none."""
        prefix, _, chosen = test.partition(":")
        if prefix in PYTHON:
            argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", "-k", chosen]
            done = self.run(*argv, PYTHON[prefix])
            failed = re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE)
            ran = re.search(r"\d+ (passed|failed)", done.stdout)
        else:
            done = self.run("cargo", "test", "--quiet", "--test", "faults", "--", test)
            failed = re.findall(r"^test (\S+) \.\.\. FAILED|^(\S+) --- FAILED", done.stdout, re.MULTILINE)
            failed = [a or b for a, b in failed]
            ran = re.search(r"result: \S+ (?!0 passed; 0 failed)", done.stdout)
        if ran is None:
            return None
        if (done.returncode != 0) != bool(failed):
            raise SystemExit(
                f"{test}: exit status {done.returncode}, but these failed: {failed}\n{done.stdout}{done.stderr}"
            )
        return failed

    def mutate(self, mutant: Mutant) -> str:
        path = self.root / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.file}: {text.count(mutant.old)} times in it, where a mutant wants it once:\n{mutant.old}"
            )
        path.write_text(text.replace(mutant.old, mutant.new))
        return text


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", action="append", help="mutants of this fault; may be repeated")
    p.add_argument("--target-dir", type=Path, help="keep build outputs here; default: in the copy")
    args = p.parse_args()
    mutants = [m for m in MUTANTS if args.only is None or str(m.fault) in args.only]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="specrs-mutants-") as root:
        tree = Tree(Path(root), (args.target_dir or Path(root) / "target").resolve())
        for test in dict.fromkeys(m.test for m in mutants):
            tree.build(test)
            failed = tree.failures(test)
            if failed is None or failed:
                raise SystemExit(f"{test}: must pass before anything is changed; failed: {failed}")
        print(f"{'fault':<6} {'taken out':<7} {'what':<48} {'where':<28} {'noticed by (tests that fail)'}", flush=True)
        for m in mutants:
            started = time.monotonic()
            original = tree.mutate(m)
            tree.build(m.test)
            failed = tree.failures(m.test) or []
            (tree.root / m.file).write_text(original)
            unnoticed += not failed
            short = ", ".join(name.split("::")[-1] for name in failed) or "NOBODY"
            print(f"{m.fault:<6} {m.kind:<9} {m.what:<48} {m.file:<28} {len(failed)}: {short}"
                  f"  [{time.monotonic() - started:.0f} s]", flush=True)  # fmt: skip
    print(f"{len(mutants)} mutants, {len(mutants) - unnoticed} noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
