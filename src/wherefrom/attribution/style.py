"""How a report looks: on screens of any width, light and dark, and on paper."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#f6f4ef;--card:#fffefb;--ink:#1b2026;--pale:#59626c;
--line:#ddd8cc;--hit:#b0430a;--link:#0b57a4;--bar:#b9c2cb;--quiet:#e9ebee}
@media(prefers-color-scheme:dark){:root{--paper:#121518;--card:#1a1e23;--ink:#e9ebee;--pale:#a5afb9;
--line:#313840;--hit:#ff9c5b;--link:#86bdff;--bar:#56616c;--quiet:#2a3037}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.page{max-width:1200px;margin:0 auto;padding:32px 24px 64px}
a{color:var(--link)}
:focus-visible{outline:3px solid var(--link);outline-offset:3px;border-radius:6px}
.skip{position:absolute;left:-999px}.skip:focus{left:16px;top:8px;background:var(--card);padding:8px}
h1{font-size:clamp(1.7rem,4vw,2.5rem);line-height:1.15;letter-spacing:-.02em;margin:0 0 8px}
h2{font-size:1.3rem;letter-spacing:-.01em;margin:48px 0 12px}
h3{font-size:1.1rem;margin:0 0 4px}
h4{font-size:.85rem;font-weight:600;margin:0 0 8px;color:var(--pale)}
p{margin:0 0 12px;max-width:72ch}.lead{font-size:1.05rem;color:var(--pale);margin-bottom:20px}
.pale,.lead{color:var(--pale)}
img{display:block;max-width:100%;background:var(--quiet);border-radius:6px}
img.dots{image-rendering:pixelated}
ol,ul{list-style:none;margin:0;padding:0}
.glance{display:grid;grid-template-columns:repeat(auto-fill,minmax(265px,1fr));gap:12px}
.glance a{display:flex;gap:8px;align-items:center;background:var(--card);
border:1px solid var(--line);border-radius:12px;padding:10px;
text-decoration:none;color:inherit;height:100%}
.glance a:hover{border-color:var(--link)}
.glance img,.glance .blank{width:58px;height:58px;object-fit:contain;flex:none}
.glance .to{color:var(--pale);flex:none}
.glance strong{display:block;font-size:1.25rem;line-height:1.2;white-space:nowrap;
font-variant-numeric:tabular-nums}strong.found,.found strong{color:var(--hit)}
.glance .small{display:block;font-size:.85rem;line-height:1.3}.glance a>:last-child{min-width:0}
.glance .called{font-size:.85rem;line-height:1.3;overflow-wrap:anywhere;display:-webkit-box;
-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}h3{overflow-wrap:anywhere}
.blank{display:grid;place-items:center;background:var(--quiet);color:var(--pale);border-radius:6px;
font-weight:600}
.card{background:var(--card);border:1px solid var(--line);border-radius:16px;padding:20px;
margin:0 0 20px;display:grid;grid-template-columns:232px minmax(0,1fr);gap:24px;
scroll-margin-top:12px}
.asked img,.asked .blank{width:232px;height:232px;object-fit:contain;margin-bottom:10px}
.asked .prompt{font-size:.95rem;margin:0 0 10px;overflow-wrap:anywhere}
.badge{display:inline-block;border-radius:999px;padding:3px 12px;font-size:.85rem;font-weight:600;
background:var(--quiet);color:var(--ink);margin:0 0 10px}
.badge.found{background:var(--hit);color:var(--card)}
.says{margin:0 0 16px}
.hits{display:grid;grid-template-columns:repeat(auto-fill,minmax(96px,1fr));gap:14px 12px;
margin:0 0 18px}
figure{margin:0}
.hits img{width:100%;aspect-ratio:1;object-fit:contain}
.hits .bar{display:block;height:5px;border-radius:3px;background:var(--quiet);margin:6px 0 4px}
.hits .bar span{display:block;height:5px;border-radius:3px;background:var(--pale)}
.hits .found .bar span{background:var(--hit)}.hits .found img{outline:3px solid var(--hit)}
.hits figcaption{font-size:.8rem;line-height:1.35;overflow-wrap:anywhere}
.hits strong{font-size:1rem;font-variant-numeric:tabular-nums}
.hits .words{display:-webkit-box;-webkit-box-orient:vertical;-webkit-line-clamp:3;overflow:hidden}
.hits .fine{display:block;color:var(--pale);font-size:.75rem}
.hits.least{grid-template-columns:repeat(auto-fill,minmax(72px,1fr));margin:0}
.hits.least strong{font-size:.85rem;font-weight:600}
.spread{margin:0 0 18px}
.spread svg{display:block;width:100%;height:84px;overflow:visible}
.spread .axis{display:flex;justify-content:space-between;gap:8px;font-size:.78rem;color:var(--pale);
border-top:1px solid var(--line);padding-top:4px;font-variant-numeric:tabular-nums}
.spread .axis b{color:var(--hit)}.spread .axis :is(:first-child,:last-child){white-space:nowrap}
.spread rect{fill:var(--bar)}.spread .hit{stroke:var(--hit);fill:var(--hit)}
.spread .mean{stroke:var(--pale)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;background:var(--card);border:1px solid var(--line);
font-size:.92rem}
th,td{text-align:left;padding:8px 12px;border-bottom:1px solid var(--line);vertical-align:middle;
overflow-wrap:break-word}
thead th{font-size:.8rem;color:var(--pale);font-weight:600}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
th.n{text-align:right}
td.draw{min-width:190px;width:34%}td.draw svg{display:block;width:100%;height:20px;overflow:visible}
.draw .share{fill:var(--bar)}.draw .share.more{fill:var(--hit)}
.draw .reach{stroke:var(--ink)}.draw .base{stroke:var(--link)}
.column{margin:0 0 28px}.column td{white-space:nowrap}.asked p.pale{font-size:.9rem}
.settings th{width:34%;font-weight:600}
.settings td{font-family:ui-monospace,Menlo,Consolas,monospace;
font-size:.85rem}
.notes{background:var(--card);border:1px solid var(--line);border-radius:16px;padding:20px 24px}
.notes p:last-child{margin:0}
footer{margin-top:40px;font-size:.85rem;color:var(--pale)}
@media(max-width:760px){.page{padding:20px 14px 40px}.card{grid-template-columns:minmax(0,1fr);
padding:14px;gap:14px}.asked{display:grid;grid-template-columns:120px minmax(0,1fr);gap:14px;
align-items:start}.asked img,.asked .blank{width:120px;height:120px;margin:0}
.hits{grid-template-columns:repeat(4,minmax(0,1fr));gap:12px 8px}
.hits.least{grid-template-columns:repeat(4,minmax(0,1fr))}
.hits.least .words,.hits.least .fine{display:none}
.hits strong{font-size:.88rem}
th,td{padding:7px 8px}td.draw{min-width:130px}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000;--pale:#444;--line:#bbb;--hit:#8f3507;
--link:#000;--bar:#aaa;--quiet:#eee}.page{max-width:none;padding:0}
.card,tr,.notes,.glance li{break-inside:avoid}.skip{display:none}h2,h3,h4{break-after:avoid}
a{text-decoration:none}.badge.found{color:#000;background:#fff;border:2px solid #000}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
