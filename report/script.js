"use strict";
const byId = id => document.getElementById(id);
const episodes = JSON.parse(byId("data").textContent);

function element(tag, className, text) {         // textContent only: episodes are never parsed as HTML
  const node = document.createElement(tag);
  node.className = className || "";
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

function copyOf(id, texts) {                     // copy of a template; texts: class of a part -> its text
  const node = byId(id).content.firstElementChild.cloneNode(true);
  for (const [name, text] of Object.entries(texts)) node.querySelector("." + name).textContent = text ?? "";
  return node;
}

// Charts: a vertical line and the values at the nearest iteration
const tip = byId("tip");

function nearestTo(svg, chart, event) {
  const box = svg.getBoundingClientRect();
  const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
  const distance = i => Math.abs(chart.positions[i] - at);
  return chart.positions.reduce((best, x, i) => distance(i) < distance(best) ? i : best, 0);
}

function showValues(svg, chart, nearest, at) {   // at: the tip's place, in pixels of the window
  const rule = svg.querySelector(".rule");
  for (const end of ["x1", "x2"]) rule.setAttribute(end, chart.positions[nearest]);
  rule.setAttribute("visibility", "visible");
  tip.replaceChildren(element("div", "", `${chart.x_name} ${chart.xs[nearest]}`));
  for (const series of chart.series) {
    if (series.ys[nearest] === null) continue;
    const line = element("div", `value ${series.tone}`);
    line.append(element("span", "", `${series.name}: `),
                element("b", "", `${series.ys[nearest]} ${chart.unit}`));
    tip.append(line);
  }
  tip.style.display = "grid";
  const {clientWidth, clientHeight} = document.documentElement;         // the window without its scrollbars
  tip.style.left = Math.max(4, Math.min(at.x + 14, clientWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(at.y + 14, clientHeight - tip.offsetHeight - 8)) + "px";
}

for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const chart = JSON.parse(svg.dataset.hover);
  const last = chart.positions.length - 1;
  let chosen = last;
  const point = event => {
    chosen = nearestTo(svg, chart, event);
    showValues(svg, chart, chosen, {x: event.clientX, y: event.clientY});
  };
  const choose = number => {
    chosen = Math.max(0, Math.min(number, last));
    const box = svg.getBoundingClientRect();
    const x = box.left + chart.positions[chosen] / svg.viewBox.baseVal.width * box.width;
    showValues(svg, chart, chosen, {x, y: box.top});
  };
  const hide = () => {
    svg.querySelector(".rule").setAttribute("visibility", "hidden");
    tip.style.display = "none";
  };
  for (const name of ["pointermove", "pointerdown"]) svg.addEventListener(name, point);
  for (const name of ["pointerleave", "blur"]) svg.addEventListener(name, hide);
  svg.addEventListener("focus", () => svg.matches(":focus-visible") && choose(chosen));
  svg.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen + step);
  });
}

// Episodes: three menus, one list of turns
const stage = e => e.phase === "rl" ? `training, iteration ${e.iteration}` : `${e.phase}, ${e.split}`;
const advantages = episodes.flatMap(e => e.turns || []).map(turn => Math.abs(turn.advantage || 0));
const strongest = advantages.reduce((a, b) => Math.max(a, b), 1e-9);
let current = -1;

function shade(advantage) {
  if (!advantage) return "";
  const strength = 0.06 + 0.44 * Math.abs(advantage) / strongest;
  return advantage > 0 ? `rgba(0,114,178,${strength})` : `rgba(213,94,0,${strength})`;
}

const signed = x => (x > 0 ? "+" : "") + x.toFixed(2);
const short = x => `${+x.toFixed(3)}`;           // a turn's penalty may be 0.002
const pill = (name, value) => element("span", `pill ${value}`, `${name}: ${value}`);

function fillHead(head, turn, number) {
  head.style.background = shade(turn.advantage);
  head.append(element("b", "", `Turn ${number}`));
  const addText = text => head.append(element("span", "", text));
  if (typeof turn.advantage === "number") addText(`advantage ${signed(turn.advantage)}`);
  if (turn.reward) addText(`reward ${short(turn.reward)}`);
  if (turn.valid === false) head.append(element("span", "pill bad", "invalid"));
  if (turn.label) head.append(pill("label", turn.label));
  if (turn.oracle) head.append(pill("oracle", turn.oracle));
  const verdicts = turn.verdicts || [];
  if (verdicts.length) addText("verdicts");
  for (const verdict of verdicts)
    head.append(element("span", `pill ${verdict || "none"}`, verdict || "unreadable"));
  if (typeof turn.judge_reward === "number") addText(`judge reward ${turn.judge_reward.toFixed(2)}`);
}

function turnCard(turn, number) {
  const card = copyOf("turn", {observation: turn.observation, response: turn.response,
                               action: `action: ${turn.action ?? "none found"}`});
  fillHead(card.querySelector(".head"), turn, number);
  return card;
}

function endCard(episode) {
  const why = episode.ended && episode.ended !== "won" ? ` (${episode.ended})` : "";
  const reward = typeof episode.reward === "number" ? `, reward ${short(episode.reward)}` : "";
  const card = copyOf("end", {outcome: (episode.won ? "Won" : "Lost") + why + reward,
                              observation: episode.final_observation});
  card.querySelector(".outcome").classList.add(episode.won ? "good" : "bad");
  return card;
}

function stripCell(turn, number, card) {
  const cell = element("button", "", number);
  cell.title = turn.action || "no action";
  cell.style.background = shade(turn.advantage);
  cell.onclick = () => card.scrollIntoView({behavior: "smooth", block: "center"});
  return cell;
}

function fill(id, labels, chosen) {              // labels: Map from an episode's index to its option's text
  byId(id).replaceChildren(...[...labels].map(([index, text]) => {
    const option = element("option", "", text);
    option.value = index;
    option.selected = text === chosen || index === chosen;
    return option;
  }));
}

function firstOf(list, label) {                  // Map from the first index of each distinct label to it
  const found = new Map();
  list.forEach(i => found.has(label(episodes[i])) || found.set(label(episodes[i]), i));
  return new Map([...found].map(([text, i]) => [i, text]));
}

const outcome = e => [e.won ? "won" : "lost", e.task_type, e.task_id, `group ${e.group}`,
                      `${(e.turns || []).length} turns`].join(" · ");

function show(index) {
  current = Math.max(0, Math.min(index, episodes.length - 1));
  const episode = episodes[current], all = [...episodes.keys()];
  const ofMethod = all.filter(i => episodes[i].method === episode.method);
  const ofStage = ofMethod.filter(i => stage(episodes[i]) === stage(episode));
  fill("method", firstOf(all, e => e.method), episode.method);
  fill("stage", firstOf(ofMethod, stage), stage(episode));
  fill("episode", new Map(ofStage.map(i => [i, outcome(episodes[i])])), current);
  byId("position").textContent = `${current + 1} of ${episodes.length}`;
  const turns = episode.turns || [], cards = turns.map((turn, i) => turnCard(turn, i + 1));
  byId("strip").replaceChildren(...turns.map((turn, i) => stripCell(turn, i + 1, cards[i])));
  byId("turns").replaceChildren(...cards, endCard(episode));
}

function go(index) {
  show(index);
  location.replace(`#episode=${current}`);
}

function fromAddress() {
  const match = /^#episode=(\d+)$/.exec(location.hash);
  if (!match || +match[1] === current) return;
  show(+match[1]);
  byId("viewer").scrollIntoView();
}

if (episodes.length) {
  for (const id of ["method", "stage", "episode"])
    byId(id).addEventListener("change", event => go(+event.target.value));
  byId("previous").onclick = () => go(current - 1);
  byId("next").onclick = () => go(current + 1);
  addEventListener("keydown", event => {
    if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const box = byId("viewer").getBoundingClientRect();
    if (event.target.tagName === "SELECT" || box.top > innerHeight / 2 || box.bottom < 0) return;     // unseen
    if (event.key === "ArrowLeft") go(current - 1);
    if (event.key === "ArrowRight") go(current + 1);
  });
  addEventListener("hashchange", fromAddress);
  fromAddress();
  if (current < 0) show(Math.max(0, episodes.findIndex(e => (e.turns || []).some(turn => turn.advantage))));
}
