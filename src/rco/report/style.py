"""The page's style sheet and its one script (sorting of tables); both are part of the page."""

from __future__ import annotations

__all__ = ["DARK", "LIGHT", "SCRIPT", "STYLE", "WIDTHS"]

# Colours are chosen to be told apart with any kind of colour vision, and to carry their text at a contrast of
# 4.5 or more; a test computes both themes' contrasts.
LIGHT = {
    "page": "#fbfbfa",
    "raised": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59616c",
    "line": "#e2e4e8",
    "grid": "#eceef1",
    "band": "#f3ede4",
    "accent": "#1f5f9e",
    "c0": "#2f6fae",
    "c1": "#c04f00",
    "c2": "#00806a",
    "c3": "#84459b",
    "pruned": "#e4e7ec",
    "lost": "#f3c08c",
    "good": "#0a6b4f",
    "bad": "#b3261e",
}
DARK = {
    "page": "#13161a",
    "raised": "#1a1e24",
    "ink": "#e6e8eb",
    "muted": "#a0a8b3",
    "line": "#2e343c",
    "grid": "#252a31",
    "band": "#2a2620",
    "accent": "#7cb8f2",
    "c0": "#6fb1ee",
    "c1": "#f5a259",
    "c2": "#4fc7ab",
    "c3": "#cf97e6",
    "pruned": "#2b3139",
    "lost": "#7d552c",
    "good": "#5fd0a8",
    "bad": "#ff8f84",
}
# Width: (fill, text) in light, then in dark. More bits, more ink; pruned experts (0) and 16 leave the scale, since
# neither is a quantization.
WIDTHS = {
    0: ("#f3c08c", "#1b1f24", "#7d552c", "#ffffff"),
    2: ("#e6eff7", "#1b1f24", "#202b37", "#e6e8eb"),
    3: ("#bcd7ec", "#1b1f24", "#234464", "#e6e8eb"),
    4: ("#86b8de", "#1b1f24", "#28618f", "#ffffff"),
    5: ("#3a78b0", "#ffffff", "#5a9fd4", "#0d1116"),
    6: ("#265f98", "#ffffff", "#82b9e2", "#0d1116"),
    7: ("#17477b", "#ffffff", "#abd0ec", "#0d1116"),
    8: ("#0b2f59", "#ffffff", "#d6e8f6", "#0d1116"),
    16: ("#4c2a5e", "#ffffff", "#dcc4ec", "#0d1116"),
}


def _variables(colours: dict[str, str], theme: int) -> str:
    lines = [f"--{name}:{value};" for name, value in colours.items()]
    lines += [
        f"--w{width}:{tones[2 * theme]};--t{width}:{tones[2 * theme + 1]};" for width, tones in WIDTHS.items()
    ]
    return "".join(lines)


_WIDTH_RULES = "".join(
    f".cell.w{width}{{fill:var(--w{width})}}.on.w{width}{{fill:var(--t{width})}}"
    f".chip.w{width}{{background:var(--w{width});color:var(--t{width})}}"
    for width in WIDTHS
)
_SERIES_RULES = "".join(
    f".curve.c{n},.rule.c{n}{{stroke:var(--c{n})}}.dot.c{n}{{fill:var(--c{n})}}" for n in range(4)
)

STYLE = (
    f"""\
:root{{color-scheme:light;{_variables(LIGHT, 0)}}}
@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{_variables(DARK, 1)}}}}}
"""
    + """\
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--page);color:var(--ink);line-height:1.55;font-size:16px;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:1080px;margin:0 auto;padding:0 24px}
header{padding-top:48px}
footer{padding-top:48px;padding-bottom:64px;color:var(--muted);font-size:14px}
h1{font-size:13px;font-weight:600;letter-spacing:.08em;text-transform:uppercase;color:var(--muted);margin:0}
h2{font-size:clamp(28px,5vw,40px);line-height:1.15;letter-spacing:-.015em;font-weight:680;margin:8px 0 8px;
overflow-wrap:anywhere;text-wrap:balance}
h2.spaced{margin-bottom:28px}
h3{font-size:22px;letter-spacing:-.005em;font-weight:640;margin:0 0 20px}
h4{font-size:16px;font-weight:640;margin:36px 0 10px}
p{margin:0 0 14px;max-width:72ch}
a{color:var(--accent);text-underline-offset:3px}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:3px}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;font-size:.88em}
code{overflow-wrap:anywhere}
pre{background:var(--raised);border:1px solid var(--line);border-radius:8px;padding:14px 16px;overflow-x:auto;
margin:0 0 14px;line-height:1.5}
pre code{overflow-wrap:normal}
.facts,.small{color:var(--muted);font-size:14px}
.facts{margin-bottom:24px}
.skip{position:absolute;left:-999px}
.skip:focus{left:16px;top:12px;background:var(--raised);padding:6px 12px;z-index:1}
nav ul{display:flex;flex-wrap:wrap;gap:6px 20px;list-style:none;margin:28px 0 0;padding:0;font-size:14px}
article+article{border-top:3px solid var(--ink);margin-top:88px;padding-top:40px}
section{margin-top:64px;padding-top:28px;border-top:1px solid var(--line);scroll-margin-top:8px}
article>section:first-of-type{margin-top:48px}
.notice{border-left:3px solid var(--c1);padding:6px 14px;background:var(--raised)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:28px 0 0}
.tile{background:var(--raised);border:1px solid var(--line);border-radius:10px;padding:16px 18px}
.tile p{margin:0}
.tile-label{color:var(--muted);font-size:13px}
.tile .tile-value{font-size:23px;text-wrap:balance;font-weight:620;
letter-spacing:-.01em;font-variant-numeric:tabular-nums;
margin:2px 0 6px;line-height:1.25}
.tile-note{color:var(--muted);font-size:13px;line-height:1.45}
.tile-value .error{font-size:15px;font-weight:400}
.error{color:var(--muted);white-space:nowrap}
.meter{display:block;width:100%;height:6px;margin:2px 0 8px}
.meter-back{fill:var(--pruned)}.meter-fill{fill:var(--c0)}.meter-fill.over{fill:var(--bad)}
.scroll{overflow-x:auto;margin:0 0 8px;max-width:100%}
table{border-collapse:collapse;font-size:15px;font-variant-numeric:tabular-nums;min-width:min(100%,520px)}
caption{caption-side:top;text-align:left;color:var(--muted);font-size:14px;padding:0 0 8px}
caption span{display:inline-block;position:sticky;left:0;max-width:min(76ch,calc(100vw - 32px))}
th,td{padding:8px 28px 8px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{font-weight:500}
thead th{color:var(--muted);font-size:13px;font-weight:600;white-space:nowrap;vertical-align:bottom}
.n{text-align:right;white-space:nowrap}
th:last-child,td:last-child{padding-right:4px}
tr.strong th,tr.strong td{font-weight:680}
tr.strong .error{font-weight:400}
tfoot th,tfoot td{border-bottom:0;padding-top:6px;padding-bottom:2px;font-weight:640}
th button{all:unset;cursor:pointer;font:inherit}
th button:focus-visible{outline:2px solid var(--accent)}
th button::after{content:"\\2195";opacity:.4;padding-left:5px}
th[aria-sort=ascending] button::after{content:"\\2191";opacity:1}
th[aria-sort=descending] button::after{content:"\\2193";opacity:1}
.tag{display:inline-block;margin-left:8px;padding:0 8px;border-radius:99px;font-size:12px;font-weight:600;
color:var(--c1);border:1px solid currentColor;white-space:nowrap;line-height:18px}
figure{margin:28px 0 20px}
figcaption{color:var(--muted);font-size:14px;max-width:76ch;margin-top:12px}
svg{font-family:inherit;display:block}
svg text{font-size:12px;fill:var(--muted)}
svg .label{font-size:12.5px;fill:var(--ink)}
svg .kind{font-size:12.5px;fill:var(--ink)}
svg .name{font-size:12.5px;paint-order:stroke;
stroke:var(--page);stroke-width:5px;stroke-linejoin:round}
svg .name.strong{fill:var(--c1);font-weight:680}
svg .mean{font-size:11.5px}
svg .on{font-size:12.5px;font-weight:620}
.plot{width:100%;height:auto;max-width:560px}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:28px 36px}
.panels .plot{max-width:520px}
.map{max-width:none;height:auto}
.shares{width:100%;max-width:620px;height:14px;border-radius:4px}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}
.dashed{stroke-dasharray:3 4;stroke-width:1.4}
.rule{fill:none;stroke-width:1.3;stroke-dasharray:6 4}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--muted);fill:none;stroke-width:.8}
.leader{stroke:var(--muted);fill:none;stroke-width:.7}
.band{fill:var(--band)}
.dot{stroke:var(--page);stroke-width:.8}
.dot.soft{fill-opacity:.6}
.dot:hover{stroke:var(--ink);stroke-width:1.5}
g:hover>.cell{stroke:var(--ink);stroke-width:1.5}
.cell.tied{stroke:var(--muted);stroke-width:1;stroke-opacity:.55}
.cell.kept{fill:var(--c0)}.cell.pruned{fill:var(--pruned)}.cell.gained{fill:var(--c1)}.cell.lost{fill:var(--lost)}
.hover{fill:transparent}
.dot.hover{stroke:none}.dot.hover:hover{fill:var(--ink);fill-opacity:.55;stroke:none}
.legend,.chips,.checks{list-style:none;margin:10px 0 18px;padding:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--muted)}
.legend li{display:flex;align-items:center;gap:7px}
.legend svg{flex:none}
.panels .legend{margin:6px 0 0;flex-direction:column}
.chips{display:flex;flex-wrap:wrap;gap:8px 18px;font-size:14px}
.chip{display:inline-block;min-width:26px;text-align:center;border-radius:4px;margin-right:8px;font-weight:620;
padding:0 6px}
.checks{margin:22px 0;display:grid;gap:8px;max-width:86ch}
.checks li{display:flex;gap:10px;font-variant-numeric:tabular-nums}
.checks .mark{font-weight:700}
.holds .mark,.holds .state{color:var(--good)}.fails .mark,.fails .state{color:var(--bad)}
details{border:1px solid var(--line);border-radius:8px;background:var(--raised);margin:12px 0}
summary{cursor:pointer;padding:10px 16px;font-weight:560}
details[open]>summary{border-bottom:1px solid var(--line);margin-bottom:14px}
details>.scroll{padding:0 16px 10px;max-height:560px;overflow-y:auto}
details td,details th{font-size:14px;padding-top:5px;padding-bottom:5px}
details thead th{position:sticky;top:0;background:var(--raised)}
@media (max-width:640px){
main,header,footer{padding-left:16px;padding-right:16px}
header{padding-top:28px}
section{margin-top:44px;padding-top:22px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
.tile{padding:12px 14px}.tile .tile-value{font-size:20px;white-space:normal}
th,td{padding-right:18px}
}
@media print{
body{font-size:11pt;background:#fff}
main,header,footer{max-width:none;padding-left:0;padding-right:0}
nav,.skip{display:none}
section{margin-top:28px;padding-top:16px}
h3,h4,caption{break-after:avoid}
figure,tr,.tile,.panels>div{break-inside:avoid}
.scroll,details>.scroll{overflow:visible;max-height:none}
.map{max-width:100%;height:auto}
pre{white-space:pre-wrap}
.panels{grid-template-columns:1fr 1fr;gap:16px}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""
    + _WIDTH_RULES
    + _SERIES_RULES
)

SCRIPT = """\
document.querySelectorAll("table.sortable").forEach(table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const number = text => parseFloat(text.replace(/\\u2212/g, "-").replace(/[,%\\s]/g, ""));
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const numeric = head.classList.contains("n");
    const key = row => row.cells[column].textContent;
    const rows = [...body.rows].sort((a, b) => {
      if (!numeric) return key(a).localeCompare(key(b), "en", {numeric: true});
      const x = number(key(a)), y = number(key(b));
      return (isNaN(x) ? -Infinity : x) - (isNaN(y) ? -Infinity : y) || 0;
    });
    if (!up) rows.reverse();
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows);
  }));
});
"""
