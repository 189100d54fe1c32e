// Opens every page of build/docs/html in headless Chromium and reports what a reader would stumble over:
// pages wider than the window, errors in the console, links that lead nowhere, serious findings of axe (accessibility), and
// places that Tab reaches without showing it.
//   node scripts/check_site.mjs [FOLDER FOR PICTURES]       scripts/check_site.sh installs what it needs
import { createServer } from "node:http";
import { readFile, readdir } from "node:fs/promises";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const modules = createRequire(path.resolve(process.env.SITE_MODULES ?? ".", "package.json"));
const { chromium } = modules("playwright-core");
const axe = readFileSync(modules.resolve("axe-core/axe.min.js"), "utf8");
const root = path.resolve("build/docs/html");
const pictures = process.argv[2];
const WIDTHS = [390, 768, 1280];
const DRAWN = ["index.html", "benchmarks.html", "filters.html", "operators.html", "examples.html"];
const TYPES = { ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".png": "image/png" };

const server = createServer(async (request, response) => {
  const file = path.join(root, decodeURIComponent(new URL(request.url, "http://x").pathname));
  try {
    response.setHeader("Content-Type", TYPES[path.extname(file)] ?? "application/octet-stream");
    response.end(await readFile(file));
  } catch {
    response.writeHead(404).end();
  }
}).listen(0);
const base = `http://127.0.0.1:${server.address().port}/`;

const pages = (await readdir(root, { recursive: true })).filter((name) => name.endsWith(".html") && !name.startsWith("_"));
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const faults = [];
const anchors = new Map(); // page -> ids
const links = []; // [page, target]
let checks = 0;

// What has the focus: a name for it, and whether a reader sees that: an outline or a shadow, its own or a part's, within the window.
function focused() {
  const element = document.activeElement;
  if (!element || element === document.body) return null;
  element.dataset.stop ??= String(document.querySelectorAll("[data-stop]").length);
  const shows = [element, ...element.children].some((part) => {
    const [style, box] = [getComputedStyle(part), part.getBoundingClientRect()];
    const marked = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0) || style.boxShadow !== "none";
    return marked && box.width > 1 && box.height > 1 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  });
  return { stop: element.dataset.stop, shows, html: element.outerHTML.slice(0, 100) };
}

// Walks through a page by Tab alone, from its link to the contents until the focus leaves the page or is where it began.
async function walk(page, report) {
  for (let count = 0; count < 600; count++) {
    await page.keyboard.press("Tab");
    if (count === 0) await page.waitForTimeout(500); // the link to the contents slides in
    const found = await page.evaluate(focused);
    if (count === 0 && !found?.html.includes("#main-content")) report(`Tab reaches first ${found?.html}`);
    if (!found || (count && found.stop === "0")) return count;
    if (Number(found.stop) < count) return report(`Tab comes back to ${found.html}`);
    if (!found.shows) report(`Tab does not show that it has reached ${found.html}`);
  }
  report("Tab does not leave the page");
}

let stops = 0;
for (const scheme of ["light", "dark"]) {
  for (const width of WIDTHS) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme: scheme });
    const page = await context.newPage();
    page.setDefaultTimeout(600_000); // a busy machine takes its time
    let name = "";
    page.on("console", (message) => message.type() === "error" && faults.push(`${name} (${width}): console: ${message.text()}`));
    page.on("pageerror", (error) => faults.push(`${name} (${width}): ${error.message}`));
    await page.route(/^https:/, (route) => route.abort());
    for (name of pages.sort()) {
      if (scheme === "dark" && !DRAWN.includes(name)) continue;
      await page.goto(base + name, { waitUntil: "load" });
      checks += 1;
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      if (wide > 0) faults.push(`${name} (${width}): ${wide} pixels wider than the window`);
      if (scheme === "light" && width === 1280) {
        anchors.set(name, new Set(await page.$$eval("[id]", (all) => all.map((element) => element.id))));
        for (const target of await page.$$eval("a[href]", (all) => all.map((a) => a.href))) links.push([name, target]);
      }
      if (width !== 768) {
        await page.evaluate(axe);
        const found = await page.evaluate(() => axe.run({ resultTypes: ["violations"] }));
        for (const v of found.violations.filter((v) => ["serious", "critical"].includes(v.impact))) {
          faults.push(`${name} (${width}, ${scheme}): axe: ${v.id}: ${v.nodes.length} x ${v.nodes[0].html.slice(0, 120)}`);
        }
      }
      if (DRAWN.includes(name) && width !== 768 && scheme === "light") {
        stops += (await walk(page, (text) => faults.push(`${name} (${width}, ${scheme}): ${text}`))) ?? 0;
        await page.evaluate(() => (document.activeElement.blur(), scrollTo(0, 0)));
      }
      if (pictures && DRAWN.includes(name)) {
        await page.screenshot({ path: path.join(pictures, `${name.replace(".html", "")}-${width}-${scheme}.png`) });
      }
    }
    await context.close();
  }
}
for (const [from, target] of links) {
  if (!target.startsWith(base)) continue;
  const url = new URL(target);
  const name = decodeURIComponent(url.pathname.slice(1)) || "index.html";
  const id = decodeURIComponent(url.hash.slice(1));
  if (!existsSync(path.join(root, name))) faults.push(`${from}: the link ${name} leads nowhere`);
  else if (id && anchors.has(name) && !anchors.get(name).has(id)) faults.push(`${from}: ${name} has no place #${id}`);
}
await browser.close();
server.close();
for (const fault of [...new Set(faults)]) console.log(fault);
console.log(`${pages.length} pages, ${checks} views, ${links.length} links, ${stops} stops of Tab: ${new Set(faults).size} faults`);
process.exit(faults.length ? 1 : 0);
