"use strict";

// A slider over the steps of training, which also plays.
for (const form of document.querySelectorAll(".moments")) {
  const [slider, label, play] = ["input", "output", "button"].map((name) => form.querySelector(name));
  const names = JSON.parse(form.dataset.names);
  const cells = [...form.nextElementSibling.querySelectorAll(".moving")];
  let timer = 0;

  const show = () => {
    label.textContent = names[slider.value];
    slider.setAttribute("aria-valuetext", names[slider.value]);
    for (const cell of cells)
      cell.querySelectorAll("img").forEach((picture, k) => (picture.hidden = k !== Number(slider.value)));
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "Play";
  };
  const advance = () => {
    slider.stepUp();
    show();
    if (slider.value === slider.max) stop();
  };

  slider.addEventListener("input", () => (stop(), show()));
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (slider.value === slider.max) slider.value = 0;
    show();
    timer = setInterval(advance, 600);
    play.textContent = "Pause";
  });
  form.hidden = false;
  show();
}

// A click enlarges a picture; arrow keys go on to its neighbours. Tab reaches the first picture of each table.
const large = document.getElementById("large");
let current = null;

function enlarge(picture) {
  current = picture;
  const copy = picture.cloneNode();
  copy.removeAttribute("tabindex");
  const words = document.createElement("p");
  words.textContent = picture.alt;
  large.replaceChildren(copy, words);
  if (!large.open) large.showModal();
}

function neighbour(by) {
  const all = [...current.closest(".table").querySelectorAll("img:not([hidden])")];
  return all[(all.indexOf(current) + by + all.length) % all.length];
}

document.querySelector("main").addEventListener("click", (event) => {
  if (event.target.matches("img")) enlarge(event.target);
});
document.querySelector("main").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("img")) enlarge(event.target);
});
large.addEventListener("click", () => large.close());
large.addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (by) {
    event.preventDefault();
    enlarge(neighbour(by));
  }
});
for (const table of document.querySelectorAll(".table")) {
  const first = table.querySelector("img:not([hidden])");
  if (first) first.tabIndex = 0;
}
