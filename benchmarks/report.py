#!/usr/bin/env python3
"""Make Markdown tables and plots of the result files. Needs no GPU.

    python -m benchmarks.report benchmarks/results

Beside each sparse-mla-<gpu>.json, indexer-<gpu>.json, engine-<gpu>.json and gguf-<gpu>.json it writes a .md of the same
name. For the attention kernel a .png for each query dtype and KV format shows time against tokens for each head count,
with peers and floor; for the indexer one shows the time of a decode against requests for each context and head count.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NATIVE = {"FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE", "FLASHMLA_SPARSE fp8", "DeepGEMM"}


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; None is an empty cell."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join("" if cell is None else str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def heading(result: dict[str, Any]) -> str:
    """Return what the measurements of a file have in common, as a paragraph."""
    hardware, versions = result["hardware"], result["versions"]
    parts = [f"{hardware['gpu']} (compute capability {hardware['capability']})"]
    parts += [f"{name} {version}" for name, version in versions.items()]
    parts += [f"commit {result.get('commit', 'unknown')}", result.get("date", "date unknown")]
    return ", ".join(parts) + ".\n"


def by_table(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return rows by query dtype, KV format and the capability whose configurations they run."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["kv"], row["capability"]), []).append(row)
    return groups


def launch(config: Row) -> str:
    """Return a configuration in short: rows of the query tile x KV rows, tokens per program, warps, stages, splits."""
    group = f", {config['group']} tokens" if config.get("group", 1) > 1 else ""
    kernel = f" {config['gluon']}" if config["gluon"] else ""
    return (
        f"{config['block_h']}x{config['block_n']}{group}, w{config['num_warps']} s{config['num_stages']}{kernel}, "
        f"{config['num_splits']} splits"
    )


def kernel_report(result: dict[str, Any]) -> str:
    """Return the tables of a kernel result file."""
    own = result["hardware"]["capability"]
    text = "# Sparse MLA kernel\n\n" + heading(result)
    rates = ", ".join(f"{rate} TFLOP/s in {dtype}" for dtype, rate in result["matmul_tflops"].items())
    text += f"\nTimes in microseconds, top-k {result['rows'][0]['topk']}. Matrix products in the same run: {rates}.\n"
    if result.get("parts", 1) > 1:
        text += f"Joined from {result['parts']} parts, run one by one, or at the same time on a GPU each.\n"
    for indices, overlap in result["neighbour_overlap"].items():
        text += f'In a prefill with "{indices}" rows, neighbouring tokens share {overlap:.1%} of them.\n'
    for (dtype, kv, capability), rows in by_table(result["rows"]).items():
        is_own = capability == own
        whose = "" if is_own else f", configurations of {capability} (table: {rows[0]['table']})"
        text += f"\n## {dtype}, {kv} KV cache{whose}\n\n"
        peers = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
        columns = ["tokens", "heads", "rows", "us", *peers, "ratio to native", "floor", "share of floor", "bound by"]
        compared = any("ratio_to_16bit" in row for row in rows)
        columns += ["ratio to 16-bit"] if compared else []
        text += table(
            [*columns, "launch"],
            (
                [row["tokens"], row["heads"], row["indices"], row["us"]]
                + [row.get("peers", {}).get(name) for name in peers]
                + [row["ratio"], row["floor_us"], f"{row['share_of_floor']:.0%}", row["bound"]]
                + ([row.get("ratio_to_16bit")] if compared else [])
                + [launch(row["config"])]
                for row in rows
            ),
        )
    text += "\n## Not compared\n\n"
    return text + table(["peer", "why"], result["peers_left_out"].items())


def indexer_report(result: dict[str, Any]) -> str:
    """Return the tables of an indexer result file."""
    text = "# Indexer logits\n\n" + heading(result)
    rates = ", ".join(f"{rate} TFLOP/s for {form}" for form, rate in result["matmul_tflops"].items())
    text += f"\nTimes in microseconds. Matrix products in the same run: {rates}.\n"
    for kind, dtype in dict.fromkeys((row["kind"], row["dtype"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["kind"], row["dtype"]) == (kind, dtype)]
        text += f"\n## {kind}, {dtype}\n\n"
        columns = ["tokens"] if kind == "prefill" else ["requests", "tokens of each"]
        columns += ["context", "heads", "us", "DeepGEMM", "ratio", "floor", "share of floor", "bound by"]
        has_schedule = any("schedule_us" in row for row in rows)
        columns += ["schedule", "DeepGEMM's schedule"] if has_schedule else []
        text += table(
            [*columns, "launch"],
            (
                [row["batch"], *([row["next_n"]] if kind == "decode" else []), row["context"], row["heads"]]
                + [row["us"], row["deepgemm_us"], row["ratio"]]
                + [row["floor_us"], f"{row['share_of_floor']:.0%}", row["bound"]]
                + ([row.get("schedule_us"), row.get("deepgemm_schedule_us")] if has_schedule else [])
                + [", ".join(f"{name} {value}" for name, value in row["config"].items() if value is not None)]
                for row in rows
            ),
        )
    left_out = {**result["peers_left_out"], **result["shapes_left_out"]}
    return text + ("\n## Left out\n\n" + table(["what", "why"], left_out.items()) if left_out else "")


def plain_report(name: str, result: dict[str, Any]) -> str:
    """Return all rows of a result file as one table."""
    columns = list(dict.fromkeys(key for row in result["rows"] for key in row))
    rows = ([cell(row.get(column)) for column in columns] for row in result["rows"])
    return f"# {name}\n\n{heading(result)}\n" + table(columns, rows)


def cell(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def lines(rows: list[Row], own: str) -> dict[str, list[tuple[int, float]]]:
    """Return what is plotted for one head count: a name to its points (tokens, microseconds)."""
    points: dict[str, list[tuple[int, float]]] = {}

    def add(name: str, row: Row, us: float) -> None:
        points.setdefault(name, []).append((row["tokens"], us))

    for row in sorted(rows, key=lambda row: row["tokens"]):
        ours = "ours" if row["capability"] == own else f"ours, as on {row['capability']}"
        if row["indices"] == "overlap":
            ours += ", shared rows"
        add(ours, row, row["us"])
        if row["capability"] == own and row["indices"] == "random":
            add("floor", row, row["floor_us"])
            for name, us in row.get("peers", {}).items():
                add(name, row, us)
    return points


def plot(rows: list[Row], title: str, own: str, path: Path) -> None:
    """Draw time against tokens, one panel a head count."""
    from matplotlib.figure import Figure

    heads = sorted({row["heads"] for row in rows})
    figure = Figure(figsize=(max(4 * len(heads), 8), 4.5), layout="constrained")
    panels = figure.subplots(1, len(heads), sharey=True, squeeze=False)[0]
    shown: dict[str, Any] = {}  # name to its line in the legend; colours stay the same over all panels
    for panel, count in zip(panels, heads, strict=True):
        for name, points in lines([row for row in rows if row["heads"] == count], own).items():
            colour = shown[name].get_color() if name in shown else f"C{len(shown)}"
            (line,) = panel.plot(*zip(*points, strict=True), color=colour, **style(name))
            shown.setdefault(name, line)
        panel.set_title(f"{count} heads")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens")
        panel.grid(True, alpha=0.3)
    panels[0].set_ylabel("microseconds per call")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def indexer_lines(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """Return what is plotted for one context and head count: a name to its points (requests, microseconds)."""
    points: dict[str, list[tuple[int, float]]] = {}
    for row in sorted(rows, key=lambda row: row["batch"]):
        is_software = row["dtype"] != "fp8"
        values = {"ours, e4m3 in software" if is_software else "ours": row["us"]}
        if not is_software:
            values |= {"DeepGEMM": row["deepgemm_us"], "floor": row["floor_us"]}
        for name, us in values.items():
            if us is not None:
                points.setdefault(name, []).append((row["batch"], us))
    return points


def plot_indexer(rows: list[Row], title: str, path: Path) -> None:
    """Draw the time of a decode against requests, one panel a context and head count."""
    from matplotlib.figure import Figure

    contexts, heads = (sorted({row[field] for row in rows}) for field in ("context", "heads"))
    size = (max(4 * len(contexts), 8), 3.5 * len(heads) + 1)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(heads), len(contexts), sharex=True, squeeze=False)
    shown: dict[str, Any] = {}
    for count, line_of_panels in zip(heads, panels, strict=True):
        for context, panel in zip(contexts, line_of_panels, strict=True):
            here = [row for row in rows if (row["context"], row["heads"]) == (context, count)]
            for name, points in indexer_lines(here).items():
                colour = shown[name].get_color() if name in shown else f"C{len(shown)}"
                (line,) = panel.plot(*zip(*points, strict=True), color=colour, **style(name))
                shown.setdefault(name, line)
            panel.set_title(f"{count} heads, context {context}", fontsize="small")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.grid(True, alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("requests")
    for panel in panels[:, 0]:
        panel.set_ylabel("microseconds per call")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def style(name: str) -> dict[str, Any]:
    """Return how a line looks: ours bold, the floor dotted, native kernels solid, other peers dashed."""
    if name == "floor":
        return {"linestyle": ":", "linewidth": 2}
    if name.startswith("ours"):
        return {"linewidth": 2.2, "marker": "*" if name.endswith("shared rows") else "o"}
    return {"linestyle": "-" if name in NATIVE else "--", "linewidth": 1.2, "marker": "."}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="?", default=Path("benchmarks/results"), help="folder")
    folder = parser.parse_args().results
    kernel, indexers = (
        [path for path in sorted(folder.glob(f"{name}-*.json")) if not path.name.endswith(".partial.json")]
        for name in ("sparse-mla", "indexer")
    )
    others = sorted([*folder.glob("engine-*.json"), *folder.glob("gguf-*.json")])
    if not kernel and not indexers and not others:
        names = "sparse-mla-*.json, indexer-*.json, engine-*.json or gguf-*.json"
        sys.exit(f"error: no {names} in {folder}\ncure: `make bench` on a GPU writes them")
    for path in others:
        write(path.with_suffix(".md"), plain_report(path.stem, json.loads(path.read_text())))
    indexer_results = {path: json.loads(path.read_text()) for path in indexers}
    for path, result in indexer_results.items():
        write(path.with_suffix(".md"), indexer_report(result))
    results = {path: json.loads(path.read_text()) for path in kernel}
    for path, result in results.items():
        if not result["rows"] or "floor_us" not in result["rows"][0]:
            sys.exit(f"error: {path} has no rows of this benchmark\ncure: run `python -m benchmarks.sparse_mla` again")
        write(path.with_suffix(".md"), kernel_report(result))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        sys.exit("error: no plots without matplotlib\ncure: pip install -r benchmarks/requirements.txt")
    for path, result in results.items():
        own = result["hardware"]["capability"]
        for dtype, kv in dict.fromkeys((row["dtype"], row["kv"]) for row in result["rows"]):
            rows = [row for row in result["rows"] if (row["dtype"], row["kv"]) == (dtype, kv)]
            title = f"{result['hardware']['gpu']}: sparse MLA, {dtype} query, {kv} KV cache, top-k {rows[0]['topk']}"
            target = path.with_name(f"{path.stem}-{dtype}-{kv}.png")
            plot(rows, title, own, target)
            print(target)
    for path, result in indexer_results.items():
        if decodes := [row for row in result["rows"] if (row["kind"], row["next_n"]) == ("decode", 1)]:
            target = path.with_suffix(".png")
            plot_indexer(decodes, f"{result['hardware']['gpu']}: indexer logits, decode", target)
            print(target)


def write(path: Path, text: str) -> None:
    path.write_text(text)
    print(path)


if __name__ == "__main__":
    main()
