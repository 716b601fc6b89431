"use strict";

// An edit is what the server draws: {picture, label, styles, seed}, or the values of the sliders. It is never changed,
// but replaced by a new one, so that undo has only to go back. `label` is a byte a pixel; the canvas only shows it.

const $ = (id) => document.getElementById(id);
const STEPS = 200; // that can be undone
const SHOWN = 60; // pictures that are offered by sight
const LONG = "Painting … The first use of the mean styles looks at many training pictures, and takes a while.";

let about, colours, width, height;
let edit, saved; // now, and when it was last saved
const originals = new Map(); // the pictures' own label maps, by number
const past = [], future = [];
let region = 0;

// ---- asking the server ----

async function ask(path, body) {
  const how = body === undefined ? {} : { method: "POST", body };
  let answer;
  try {
    answer = await fetch(path, how);
  } catch {
    throw new Error("The editor does not answer: has python -m gan.edit ended? Start it, and open its new address.");
  }
  if (answer.status >= 500 && answer.status !== 503)
    throw new Error("The editor has failed; the terminal in which it runs says why.");
  if (!answer.ok) throw new Error(await answer.text());
  return answer;
}

function say(problem) {
  $("problem").textContent = problem ? problem.message : "";
  $("problem").hidden = !problem;
}

function encoded(label) {
  let text = "";
  for (let k = 0; k < label.length; k += 8192) text += String.fromCharCode(...label.subarray(k, k + 8192));
  return btoa(text);
}

function sent(edit) {
  const { label, ...rest } = edit;
  return label && label !== originals.get(edit.picture) ? { ...rest, label: encoded(label) } : rest;
}

// The picture of an edit and notes.
const drawn = async (edit) => (await ask("draw", JSON.stringify(sent(edit)))).json();

// One request is on its way; of what was changed meanwhile the newest is asked for when its answer is here.
let asking = 0;

function inTurns(work) {
  let waiting = null, busy = false;
  return async (wanted = edit) => {
    waiting = wanted;
    if (busy) return;
    busy = true;
    asking++;
    while (waiting) {
      const now = waiting;
      waiting = null;
      try {
        await work(now);
      } catch (problem) {
        say(problem);
      }
    }
    busy = false;
    asking--;
  };
}

const draw = inTurns(async (now) => {
  const began = performance.now();
  let words = "";
  $("status").textContent = "Painting …";
  const long = setTimeout(() => about.kind === "styles" && ($("status").textContent = LONG), 3000);
  try {
    const { picture, notes } = await drawn(now);
    $("after").src = picture;
    await $("after").decode();
    say(null);
    words = [`Painted in ${Math.round(performance.now() - began)} ms.`, ...notes].join(" ");
  } finally {
    clearTimeout(long);
    $("status").textContent = words;
  }
});

let shownBefore = null;

const drawBefore = inTurns(async (now) => {
  const kept = about.sliders?.filter((each) => each.kept).map((each) => each.name) ?? ["picture", "seed"];
  const before = Object.fromEntries(kept.map((name) => [name, now[name]]));
  if (shownBefore === JSON.stringify(before)) return;
  $("before").src = (await drawn(before)).picture;
  shownBefore = JSON.stringify(before);
});

// ---- changing the edit ----

async function change(parts) {
  const picture = parts.picture ?? edit?.picture;
  if (about.kind !== "noise" && !originals.has(picture)) {
    const answer = await ask(`label/${picture}`);
    originals.set(picture, new Uint8Array(await answer.arrayBuffer()));
  }
  up(); // what was painted meanwhile comes before
  put(parts);
}

function put(parts) {
  if (edit) past.push(edit);
  if (past.length > STEPS) past.shift();
  future.length = 0;
  const { run, step, ...rest } = edit ?? {}; // of an opened edit; what is made of it here is no longer theirs
  take({ ...rest, ...parts });
}

function take(next) {
  edit = about.kind === "noise" ? next : { ...next, label: next.label ?? originals.get(next.picture) };
  show();
  draw();
  drawBefore();
}

function back(from, to) {
  up();
  if (!from.length) return;
  to.push(edit);
  take(from.pop());
}

const begin = (picture) => change({ picture, label: null, styles: {} });

function restyle(parts) {
  const name = about.regions[region].name;
  const now = edit.styles[name] ?? { from: "own", to: "own", share: 0 };
  return change({ styles: { ...edit.styles, [name]: { ...now, ...parts } } });
}

// ---- what is shown ----

function show() {
  $("undo").disabled = !past.length;
  $("redo").disabled = !future.length;
  if (about.kind === "noise") return showSliders();
  paintCanvas(edit.label);
  const there = new Set(edit.label);
  for (const [k, { name }] of about.regions.entries()) {
    const row = $(`region-${k}`).parentElement;
    row.classList.toggle("absent", !there.has(k));
    row.classList.toggle("styled", name in edit.styles);
  }
  const { name } = about.regions[region];
  const { from, to, share } = edit.styles[name] ?? { from: "own", to: "own", share: 0 };
  $(`region-${region}`).checked = true;
  $("chosen").textContent = name;
  $("from").replaceChildren(...offer(from));
  $("to").replaceChildren(...offer(to));
  $("share").value = Math.round(100 * share);
  $("share").disabled = from === to;
  $("own").disabled = !(name in edit.styles);
  $("seed").value = edit.seed;
  label("size", `${$("size").value} px`);
  label("share", `${$("share").value} %`);
}

function label(id, text) {
  document.querySelector(`output[for="${id}"]`).textContent = text;
  $(id).setAttribute("aria-valuetext", text);
}

function offer(which) {
  const words = /^\d+$/.test(which) ? `picture ${which}` : { own: "its own", mean: "the mean" }[which] ?? which;
  if (!/^\d+$/.test(which)) return [words];
  const image = Object.assign(new Image(), { alt: "", loading: "lazy", src: `picture/${which}` });
  return [image, words];
}

function paintCanvas(map) {
  const pixels = new ImageData(width, height);
  const packed = new Uint32Array(pixels.data.buffer);
  for (let k = 0; k < packed.length; k++) packed[k] = colours[map[k]];
  $("canvas").getContext("2d").putImageData(pixels, 0, 0);
}

// ---- painting on the label map: whole pixels, without soft edges ----

let stroke = null; // the map that is being painted
let last = null; // where the brush is

function stamp(map, x, y) {
  const size = Number($("size").value), radius = size / 2;
  const [cx, cy] = size % 2 ? [Math.floor(x) + 0.5, Math.floor(y) + 0.5] : [Math.round(x), Math.round(y)];
  for (let row = Math.max(0, Math.floor(cy - radius)); row < Math.min(height, cy + radius); row++)
    for (let column = Math.max(0, Math.floor(cx - radius)); column < Math.min(width, cx + radius); column++)
      if ((column + 0.5 - cx) ** 2 + (row + 0.5 - cy) ** 2 <= radius ** 2) map[row * width + column] = region;
}

function line(map, [x0, y0], [x1, y1]) {
  const steps = Math.ceil(2 * Math.max(Math.abs(x1 - x0), Math.abs(y1 - y0), 0.5));
  for (let k = 0; k <= steps; k++) stamp(map, x0 + ((x1 - x0) * k) / steps, y0 + ((y1 - y0) * k) / steps);
}

function fill(map, x, y) {
  const old = map[y * width + x];
  const open = old === region ? [] : [[x, y]];
  while (open.length) {
    const [column, row] = open.pop();
    if (column < 0 || row < 0 || column >= width || row >= height || map[row * width + column] !== old) continue;
    map[row * width + column] = region;
    open.push([column - 1, row], [column + 1, row], [column, row - 1], [column, row + 1]);
  }
}

const tool = () => document.querySelector('input[name="tool"]:checked').value;

function down([x, y]) {
  const [column, row] = [Math.floor(x), Math.floor(y)];
  if (!edit?.label || column < 0 || row < 0 || column >= width || row >= height) return;
  if (tool() === "pick") {
    region = edit.label[row * width + column];
    return show();
  }
  const map = edit.label.slice();
  if (tool() === "fill") {
    fill(map, column, row);
    return change({ label: map });
  }
  [stroke, last] = [map, [x, y]];
  move([[x, y]]);
}

function move(places) {
  for (const place of places) {
    line(stroke, last, place);
    last = place;
  }
  paintCanvas(stroke);
  draw({ ...edit, label: stroke });
}

function up() {
  if (!stroke) return;
  const label = stroke;
  stroke = null;
  put({ label });
}

function ring([x, y]) {
  Object.assign($("ring").style, {
    left: `${(100 * x) / width}%`,
    top: `${(100 * y) / height}%`,
    width: `${(100 * $("size").value) / width}%`,
    height: `${(100 * $("size").value) / height}%`,
  });
  $("ring").hidden = tool() !== "brush";
}

function listenToCanvas() {
  const canvas = $("canvas");
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !edit) return;
    canvas.setPointerCapture(event.pointerId);
    down(place(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    ring(place(event));
    const events = event.getCoalescedEvents?.() ?? [];
    if (stroke) move((events.length ? events : [event]).map(place));
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, up);
  canvas.addEventListener("pointerleave", () => ($("ring").hidden = true));

  // The same with keys: arrows move the brush, and Space paints.
  let [x, y] = [width / 2, height / 2];
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (by) {
      const far = event.shiftKey ? 8 : 1;
      x = Math.min(width - 0.5, Math.max(0.5, x + far * by[0]));
      y = Math.min(height - 0.5, Math.max(0.5, y + far * by[1]));
    } else if (event.key === " ") {
      down([x, y]);
      up();
    } else return;
    event.preventDefault();
    ring([x, y]);
  });
  canvas.addEventListener("blur", () => ($("ring").hidden = true));
}

// ---- choosing a picture, or a style ----

function choose(title, words, done) {
  const numbers = [...Array(Math.min(SHOWN, about.pictures)).keys()].map(String);
  const offers = [...words, ...numbers].map((which) => {
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.replaceChildren(...offer(which));
    button.addEventListener("click", () => finish(which));
    return button;
  });
  const finish = (which) => {
    $("dialog").close();
    Promise.resolve(done(which)).catch(say);
  };
  $("asked").textContent = title;
  $("offers").replaceChildren(...offers);
  $("number").max = about.pictures - 1;
  $("take").onclick = () => finish(String(Math.min(about.pictures - 1, Math.max(0, Math.floor($("number").value)))));
  $("dialog").showModal();
}

// ---- sliders, for games that draw from noise ----

function makeSliders() {
  for (const { name, title, min, max, step, names } of about.sliders) {
    const make = (tag, parts) => Object.assign(document.createElement(tag), { name, ...parts });
    const inputs = names.length ? [make("select")] : ["range", "number"].map((type) => make("input", { type, min, max, step }));
    inputs[0].append(...names.map((each, k) => new Option(each, k)));
    inputs[0].id = `slider-${name}`;
    inputs[1]?.setAttribute("aria-label", `${title}, as a number`);
    inputs[0].addEventListener("input", () => draw({ ...edit, [name]: Number(inputs[0].value) }));
    const typed = step === 1 ? Math.floor : Number;
    for (const input of inputs) input.addEventListener("change", () => change({ [name]: typed(input.value) }));
    const words = Object.assign(document.createElement("label"), { htmlFor: inputs[0].id, textContent: title });
    $("sliders").append(words, ...inputs);
  }
}

function showSliders() {
  for (const { name } of about.sliders) {
    for (const input of document.getElementsByName(name)) input.value = edit[name];
  }
}

// ---- files ----

const save = (name, href) => Object.assign(document.createElement("a"), { href, download: name }).click();
const kept = (blob) => URL.createObjectURL(blob);

const fileName = (ending) => `${about.run}-${about.kind === "noise" ? `seed${edit.seed}` : edit.picture}${ending}`;

async function open(file) {
  if (file.name.toLowerCase().endsWith(".png")) {
    const answer = await ask("upload", file);
    return change({ label: new Uint8Array(await answer.arrayBuffer()) });
  }
  let found;
  try {
    found = JSON.parse(await file.text());
    const { label, ...rest } = found;
    const whole = about.kind === "noise" ? { ...start(), class: undefined } : { picture: 0, styles: {}, seed: 0, label: null };
    found = { ...whole, ...rest }; // without a class: that of the seed
    if (label) found.label = Uint8Array.from(atob(label), (letter) => letter.charCodeAt(0));
  } catch {
    throw new Error(`${file.name} is no edit; choose a file that Save the edit has written, or a label map as PNG.`);
  }
  await drawn(found); // refused, in words, before anything is changed
  await change(found);
}

// ---- the page ----

function listen() {
  const on = (id, event, deed) =>
    $(id).addEventListener(event, async () => {
      try {
        await deed();
      } catch (problem) {
        say(problem);
      }
    });
  on("undo", "click", () => back(past, future));
  on("redo", "click", () => back(future, past));
  on("reset", "click", () => (about.kind === "noise" ? change(start()) : begin(edit.picture)));
  on("open", "click", () => $("file").click());
  on("file", "change", async () => {
    const [file] = $("file").files;
    $("file").value = "";
    if (file) await open(file);
  });
  on("save-picture", "click", async () => save(fileName(".png"), (await drawn(edit)).picture));
  on("save-mask", "click", async () => {
    const answer = await ask("mask", JSON.stringify(sent(edit)));
    save(fileName("-mask.png"), kept(await answer.blob()));
  });
  on("save-edit", "click", () => {
    const whole = { run: about.run, step: about.step, ...sent(edit) };
    save(fileName("-edit.json"), kept(new Blob([JSON.stringify(whole)], { type: "application/json" })));
    saved = edit;
  });
  on("choose", "click", () => choose("Choose a picture to edit", [], (which) => begin(Number(which))));
  for (const end of ["from", "to"])
    on(end, "click", () => choose("Choose a style", ["own", "mean", ...about.files], (which) => restyle({ [end]: which })));
  on("size", "input", () => label("size", `${$("size").value} px`));
  on("share", "input", () => {
    const { name } = about.regions[region];
    label("share", `${$("share").value} %`);
    draw({ ...edit, styles: { ...edit.styles, [name]: { ...edit.styles[name], share: $("share").value / 100 } } });
  });
  on("share", "change", () => restyle({ share: $("share").value / 100 }));
  on("own", "click", () => {
    const { [about.regions[region].name]: _, ...styles } = edit.styles;
    change({ styles });
  });
  on("everywhere", "click", () => {
    const style = edit.styles[about.regions[region].name];
    change({ styles: style ? Object.fromEntries(about.regions.map(({ name }) => [name, style])) : {} });
  });
  on("seed", "change", () => change({ seed: Math.max(0, Math.floor($("seed").value)) }));
  on("close", "click", () => $("dialog").close());
  window.addEventListener("beforeunload", (event) => past.length && edit.label && edit !== saved && event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const step = { "[": -1, "]": 1 }[event.key];
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") $(event.shiftKey ? "redo" : "undo").click();
    else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "y") $("redo").click();
    else if (step && event.target.type !== "number") {
      $("size").value = Number($("size").value) + step;
      return label("size", `${$("size").value} px`);
    } else return;
    event.preventDefault();
  });
}

const start = () => Object.fromEntries(about.sliders.map(({ name, value }) => [name, value]));

async function main() {
  about = await (await ask("about", "")).json();
  document.title = $("standing").previousElementSibling.textContent = about.run;
  $("standing").textContent = `step ${about.step}`;
  for (const kind of ["labels", "styles", "noise"]) {
    const fits = about.kind === kind || (kind === "labels" && about.kind === "styles");
    for (const each of document.querySelectorAll(`.for-${kind}`)) each.hidden ||= !fits;
  }
  document.querySelector("main").hidden = false;
  if (about.kind === "noise") {
    makeSliders();
    $("before").parentElement.hidden = about.sliders.every((each) => each.kept); // it would be the same picture
    listen();
    return change(start());
  }
  [height, width] = about.size;
  colours = about.regions.map(({ colour: [red, green, blue] }) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0);
  Object.assign($("canvas"), { width, height });
  $("size").value = Math.max(2, Math.round(width / 16));
  for (const [k, { name, colour }] of about.regions.entries()) {
    const row = document.createElement("label");
    const input = Object.assign(document.createElement("input"), { type: "radio", name: "region", id: `region-${k}`, value: k });
    const swatch = Object.assign(document.createElement("span"), { className: "swatch" });
    swatch.style.background = `rgb(${colour})`;
    input.addEventListener("change", () => {
      region = k;
      show();
    });
    row.append(input, swatch, name);
    $("regions").append(row);
  }
  for (const id of ["before", "after"]) $(id).classList.toggle("large", width > 128);
  listen();
  listenToCanvas();
  await change({ picture: 0, styles: {}, seed: 0 });
  region = edit.label[(height >> 1) * width + (width >> 1)]; // the one in the middle: region 0 may be in no picture
  show();
}

main().catch(say);
