"""Draws the pictures of the README from a real run of the demo: one step, and one completion.

    python -m demo.pictures --bundle build/demo/bundle --out docs/pictures

Writes step.svg (text, lattice of frames, token tree, accepted path) and completion.svg (the completion, with
the tokens of the draft head in green). Both are plain SVG without fonts, on a card of their own that is light
or dark as the reader's system is.
"""

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import HOST_STEP
from runtime.core.cli import Parser, at_least, exit_status
from runtime.core.errors import UserError
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from runtime.decode.sequence import Chunk
from runtime.decoder import SpeculativeDecoder

# From GSM8K's test split.
QUESTION = (
    "James decides to run 3 sprints 3 times a week.  He runs 60 meters each sprint.  "
    "How many total meters does he run a week?"
)
MAX_NEW_TOKENS = 128

WIDTH, MARGIN = 960, 24
# Width of a character of the monospaced font, of the lines of text and of the tokens in boxes.
TEXT_CHARACTER, TOKEN_CHARACTER = 8.4, 6.6
LINE_HEIGHT = 22
NUM_LABELS = 4
CELL_WIDTH, CELL_HEIGHT, CELL_GAP = 36, 24, 3
NODE_HEIGHT, NODE_PITCH = 24, 34
TREE_LEFT = 530

STYLE = """
.card{fill:#fff;stroke:#d0d7de}.ink{fill:#1f2328}.dim{fill:#59636e}.drafted{fill:#1a7f37;font-weight:600}
.own{fill:#0969da;font-weight:600}.cell{fill:#8250df}.frame{fill:none;stroke:#d0d7de}
.node{fill:#f6f8fa;stroke:#d0d7de}.root{fill:#f6f8fa;stroke:#1f2328}.accepted{fill:#dafbe1;stroke:#1a7f37}.bonus{fill:#ddf4ff;stroke:#0969da}
.edge{fill:none;stroke:#d0d7de;stroke-width:1.5}.path{fill:none;stroke:#1a7f37;stroke-width:2.5}
.end{fill:none;stroke:#0969da;stroke-width:2;stroke-dasharray:3 3}
text{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}.head{font-weight:600}
.mono{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
.token{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}
@media (prefers-color-scheme:dark){
.card{fill:#0d1117;stroke:#3d444d}.ink{fill:#f0f6fc}.dim{fill:#9198a1}.drafted{fill:#3fb950}.own{fill:#58a6ff}
.cell{fill:#ab7df8}.frame{stroke:#3d444d}.node{fill:#151b23;stroke:#3d444d}.root{fill:#151b23;stroke:#f0f6fc}
.accepted{fill:#12361f;stroke:#3fb950}.bonus{fill:#10294a;stroke:#58a6ff}.edge{stroke:#3d444d}.path{stroke:#3fb950}
.end{stroke:#58a6ff}}
"""

# Text and the class of its colour.
Span = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """One verify step of the run.

    before: the text before the root, prompt and completion
    path: [A] int64, nodes of the tree that were accepted, the root first
    """

    before: str
    lattice: Lattice
    tree: TokenTree
    path: NDArray[np.int64]
    bonus_token: int


@dataclass(frozen=True)
class Recording:
    """A decoded prompt. ``steps`` leaves out the last one, which the end of the text may cut."""

    prompt: str
    chunks: list[Chunk]
    steps: list[Step]
    decoder: SpeculativeDecoder

    def token(self, token_id: int) -> str:
        """A token as the pictures show it: spaces as dots, line ends as arrows."""
        text: str = self.decoder.prompt_tokenizer.tokenizer.decode([int(token_id)], skip_special_tokens=True)
        return _visible(text) or "end"


def main(argv: list[str] | None = None) -> int:
    parser = Parser("pictures", "demo.pictures", __doc__)
    parser.add_argument("--bundle", type=Path, required=True, help="engine bundle with a parallel draft head")
    parser.add_argument("--prompt", default=QUESTION, help="a user's message")
    parser.add_argument("--num-nodes", type=at_least(1), default=8, help="draft nodes of a step")
    parser.add_argument("--step", type=at_least(1), help="which step is drawn (default: one that shows most)")
    parser.add_argument("--out", type=Path, required=True, help="directory of the pictures")
    args = parser.parse_args(argv)
    return exit_status("pictures", lambda: draw(args))


def draw(args: argparse.Namespace) -> int:
    """Decode the prompt and write both pictures."""
    recording = record(args.bundle, args.prompt, args.num_nodes)
    steps = recording.steps
    if not steps:
        raise UserError("--prompt: the completion has a single step, so there is nothing to draw")
    if args.step is not None and args.step > len(steps):
        raise UserError(f"--step: must be at most {len(steps)}, got {args.step}")
    step = steps[args.step - 1] if args.step else max(steps, key=_shown)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, text in (("step", step_svg(recording, step)), ("completion", completion_svg(recording))):
        path = args.out / f"{name}.svg"
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


def record(bundle: Path, prompt: str, num_nodes: int) -> Recording:
    """Decode the prompt greedily, and keep the lattice and the tree of every step."""
    drafts: list[tuple[Lattice, TokenTree]] = []

    def keep(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
        tree = prefix_search(lattice, root_token=root_token, num_nodes=num_nodes)
        # The next pass of the draft head writes to the same memory.
        drafts.append((copy.deepcopy(lattice), tree))
        return tree

    decoder = SpeculativeDecoder.from_bundle(bundle, step=HOST_STEP, num_nodes=num_nodes, search=keep)
    drafts.clear()  # loading tries the head
    prompt_ids = decoder.prompt_tokenizer.encode(prompt)
    chunks = list(decoder.stream(prompt_ids, max_new_tokens=MAX_NEW_TOKENS))
    if len(chunks) > 1 and not drafts:
        raise UserError(f"--bundle: {bundle} has no parallel draft head")
    steps = []
    text = prompt
    for (lattice, tree), chunk, following in zip(drafts, chunks, chunks[1:-1], strict=False):
        text += "".join(piece.text for piece in chunk.pieces[:-1])
        tokens = iter(following.token_ids)
        path, bonus_token = tree.walk(lambda _, tokens=tokens: next(tokens))  # type: ignore[misc]
        steps.append(Step(text, lattice, tree, path, bonus_token))
        text += chunk.pieces[-1].text
    return Recording(prompt, chunks, steps, decoder)


def _shown(step: Step) -> int:
    """How much a step shows: one is best that accepts many nodes and rejects many."""
    accepted = step.path.size - 1
    return int(accepted * (len(step.tree) - 1 - accepted))


def step_svg(recording: Recording, step: Step) -> str:
    """The picture of one step."""
    drafted = [recording.token(token) for token in step.tree.tokens[step.path[1:]]]
    root, bonus = recording.token(step.tree.tokens[0]), recording.token(step.bonus_token)
    top = 122
    tree, tree_height = _tree(recording, step, top)
    lattice = _lattice(recording, step.lattice, top)
    bottom = top + max(tree_height, (NUM_LABELS + 1) * (CELL_HEIGHT + CELL_GAP) + 24) + 34
    num_frames, num_nodes = step.lattice.frame_tokens.shape[0], len(step.tree) - 1
    # The line leaves room for what this step adds.
    room = int((WIDTH - 2 * MARGIN) / TEXT_CHARACTER) - sum(map(len, [root, *drafted, bonus])) - 1
    before = _visible(step.before)
    before = before if len(before) <= room else f"…{before[1 - room :]}"
    parts = [
        _heading(MARGIN, 34, "1", "The text so far"),
        _line(62, [(before, "dim"), (root, "ink")]),
        _heading(MARGIN, 106, "2", f"The draft head fills {num_frames} frames in one pass"),
        lattice,
        _heading(TREE_LEFT, 106, "3", f"A search builds a tree of {num_nodes} tokens from them"),
        tree,
        _heading(MARGIN, bottom, "4", "The model verifies the whole tree in one pass"),
        _line(
            bottom + 28,
            [(before, "dim"), (root, "ink"), *((token, "drafted") for token in drafted), (bonus, "own")],
        ),
        f'<text class="dim" x="{MARGIN}" y="{bottom + 56}">'
        f"It keeps the {len(drafted)} drafts that it would have written itself "
        f'(<tspan class="drafted">green</tspan>) and adds a token of its own '
        f'(<tspan class="own">blue</tspan>): {len(drafted) + 1} tokens from one pass.</text>',
    ]
    title = "One decode step: text, lattice of frames, token tree, accepted path"
    return _card(title, bottom + 78, parts)


def _lattice(recording: Recording, lattice: Lattice, top: float) -> str:
    """Columns of frames: the most probable labels, and the blank. The darker, the more probable."""
    parts = []
    for frame, (tokens, log_probs) in enumerate(
        zip(lattice.frame_tokens, lattice.frame_logprobs, strict=True)
    ):
        x = MARGIN + frame * (CELL_WIDTH + CELL_GAP)
        labels = [recording.token(token) for token in tokens[:NUM_LABELS]]
        probabilities = [*np.exp(log_probs[:NUM_LABELS]), np.exp(lattice.blank_logprobs[frame])]
        for row, (label, probability) in enumerate(zip([*labels, "∅"], probabilities, strict=True)):
            y = top + row * (CELL_HEIGHT + CELL_GAP)
            box = f'x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="4"'
            parts.append(f'<rect class="cell" {box} fill-opacity="{0.8 * probability**0.5:.2f}"/>')
            parts.append(f'<rect class="frame" {box}/>')
            parts.append(_token(x + CELL_WIDTH / 2, y + 16, label, CELL_WIDTH, "ink"))
    y = top + (NUM_LABELS + 1) * (CELL_HEIGHT + CELL_GAP) + 16
    text = "A column is a frame. The stronger the colour, the likelier the token. ∅ is the blank of CTC."
    return "\n".join([*parts, f'<text class="dim" x="{MARGIN}" y="{y}">{text}</text>'])


def _tree(recording: Recording, step: Step, top: float) -> tuple[str, float]:
    """The tree, from left to right, with the token that the model adds; and its height."""
    tree, path = step.tree, set(step.path.tolist())
    parents = [*tree.parents.tolist(), int(step.path[-1])]
    depths = [*tree.depths.tolist(), int(tree.depths[step.path[-1]]) + 1]
    labels = [*map(recording.token, tree.tokens), recording.token(step.bonus_token)]
    bonus = len(tree)
    rows = _rows(parents, path | {bonus})
    pitch = min(62.0, (WIDTH - MARGIN - TREE_LEFT) / (max(depths) + 1))
    width = pitch - 12
    edges, nodes = [], []
    for node, (parent, depth, label) in enumerate(zip(parents, depths, labels, strict=True)):
        x, y = TREE_LEFT + depth * pitch, top + rows[node] * NODE_PITCH
        if parent >= 0:
            start, above = x - pitch + width, top + rows[parent] * NODE_PITCH
            middle = (start + x) / 2
            ends = [above + NODE_HEIGHT / 2, y + NODE_HEIGHT / 2]
            kind = "end" if node == bonus else "path" if node in path else "edge"
            curve = f"M{start:.1f} {ends[0]}C{middle:.1f} {ends[0]} {middle:.1f} {ends[1]} {x:.1f} {ends[1]}"
            edges.append(f'<path class="{kind}" d="{curve}"/>')
        kind = "bonus" if node == bonus else "node"
        if node in path:
            kind = "accepted" if node else "root"
        nodes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{NODE_HEIGHT}" rx="6"/>'
        )
        colour = {"bonus": "own", "accepted": "drafted"}.get(kind, "ink" if kind == "root" else "dim")
        nodes.append(_token(x + width / 2, y + 16, label, width, colour))
    return "\n".join(edges + nodes), (max(rows) + 1) * NODE_PITCH


def _rows(parents: Sequence[int], first: set[int]) -> list[int]:
    """The row of every node: its first child's, where children on the accepted path come first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    rows = [0] * len(parents)
    next_row = 0

    def place(node: int) -> None:
        nonlocal next_row
        below = sorted(children.get(node, []), key=lambda child: (child not in first, child))
        rows[node] = next_row
        for index, child in enumerate(below):
            next_row += index > 0
            place(child)

    place(0)
    return rows


def completion_svg(recording: Recording) -> str:
    """The picture of the completion, whose drafted tokens are green."""
    columns = int((WIDTH - 2 * MARGIN) / TEXT_CHARACTER)
    pieces = [piece for chunk in recording.chunks for piece in chunk.pieces]
    spans = [(piece.text, "drafted" if piece.drafted else "ink") for piece in pieces]
    spans[0] = (spans[0][0].lstrip(), "ink")
    lines = [*_wrapped([(recording.prompt, "dim")], columns), *_wrapped(spans, columns)]
    num_steps, num_drafted = len(recording.chunks) - 1, sum(piece.drafted for piece in pieces)
    end = 44 + len(lines) * LINE_HEIGHT
    caption = (
        f"{len(pieces)} tokens in {num_steps} steps. The draft head proposed "
        f'<tspan class="drafted">the {num_drafted} green ones</tspan>, and the model confirmed them. '
        "The others are the model's own."
    )
    parts = [_line(44 + index * LINE_HEIGHT, line) for index, line in enumerate(lines)]
    parts.append(f'<text class="dim" x="{MARGIN}" y="{end + 14}">{caption}</text>')
    return _card("A completion of the demo model; drafted tokens are green", end + 38, parts)


def _wrapped(spans: Sequence[Span], columns: int) -> list[list[Span]]:
    """Lines of at most so many characters; they end between words, or at the text's own ends of lines."""
    characters = [(character, colour) for text, colour in spans for character in text]
    lines: list[list[Span]] = []
    while characters:
        ends = [index for index, (character, _) in enumerate(characters[:columns]) if character == "\n"]
        end = ends[0] + 1 if ends else len(characters)
        if not ends and len(characters) > columns:
            spaces = [index for index in range(columns) if characters[index][0] == " "]
            end = spaces[-1] + 1 if spaces else columns
        line: list[Span] = []
        for character, colour in characters[:end]:
            if line and line[-1][1] == colour:
                line[-1] = (line[-1][0] + character, colour)
            else:
                line.append((character, colour))
        lines.append([(text.rstrip("\n"), colour) for text, colour in line])
        characters = characters[end:]
    return lines


def _escaped(text: str) -> str:
    """Text for an SVG file, in which control characters cannot be written."""
    return escape("".join(character if character.isprintable() else "\ufffd" for character in text))


def _visible(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "↵")


def _token(x: float, y: float, text: str, width: float, colour: str) -> str:
    """A token in the middle of a box, cut to the box's width."""
    room = int((width - 2) / TOKEN_CHARACTER)
    text = text if len(text) <= room else f"{text[: room - 1]}…"
    return f'<text class="token {colour}" x="{x:.1f}" y="{y}" text-anchor="middle">{_escaped(text)}</text>'


def _heading(x: float, y: float, number: str, text: str) -> str:
    return (
        f'<text class="head ink" x="{x}" y="{y}"><tspan class="own">{number}</tspan>  {escape(text)}</text>'
    )


def _line(y: float, spans: Sequence[Span]) -> str:
    found = "".join(f'<tspan class="{colour}">{_escaped(text)}</tspan>' for text, colour in spans)
    return f'<text class="mono" x="{MARGIN}" y="{y}" xml:space="preserve">{found}</text>'


def _card(title: str, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="card" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="10"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
