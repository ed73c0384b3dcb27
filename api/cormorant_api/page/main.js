// Puts the page together: the stream's news go to the parts that show them.

import { Problem, call, token } from "./api.js";
import { Eyes } from "./eyes.js";
import { Events } from "./events.js";
import { clock, count, number } from "./format.js";
import { Plot } from "./plot.js";
import { Rows, setText } from "./rows.js";
import { Stream } from "./stream.js";
import { Weights } from "./weights.js";

const OWNER = "page";
const PAUSE_S = 3600;
const MOST_WORKERS = 200;
const KEPT_S = 1000;

const $ = (id) => document.getElementById(id);
const plots = {
  fps: new Plot($("plot-fps"), { name: "Frames per second", format: (value) => `${count(value)} frames per second` }),
  return: new Plot($("plot-return"), { name: "Mean episode return", format: (value) => `return ${number(value)}` }),
};
const workers = new Rows($("workers"), (worker) => worker.id, [
  { text: (worker) => worker.id },
  { text: (worker) => worker.phase },
  { text: (worker) => (worker.version < 0 ? "–" : `${worker.version}`), isNumber: true },
  { text: (worker) => `${worker.lag}`, isNumber: true, warns: (worker) => worker.lag > 1 },
  { text: (worker) => count(worker.per_second), isNumber: true },
  { text: (worker) => count(worker.frames), isNumber: true },
  { text: (worker) => `${worker.attempt}`, isNumber: true },
  { text: (worker) => `${worker.env_restarts}`, isNumber: true, warns: (worker) => worker.env_restarts > 0 },
]);
const weights = new Weights($("updates"), $("no-updates"));
const events = new Events($("events"));
const eyes = new Eyes({
  details: $("eyes"), worker: $("eyes-worker"), env: $("eyes-env"), canvas: $("eyes-canvas"), note: $("eyes-note"), none: $("no-eyes"),
});

let role = "read";
let moment = null;
let points = []; // [seconds since 1970, frames per second, mean return or null], oldest first
let hasWorked = false; // with the present token
let isAway = false;
let byeReason = "";
let countdown;

const stream = new Stream({
  hello(data) {
    role = data.role;
    hasWorked = true;
  },
  connected() {
    clearInterval(countdown);
    showDoor(false);
    $("retry").hidden = true;
    setText($("link-text"), "Live");
    setText($("trouble"), "");
    if (isAway) say("Connected again.");
    isAway = false;
    byeReason = "";
  },
  opening(data) {
    eyes.offer(data.picture, data.num_envs);
    const { at, per_second, mean_return } = data.history;
    const first = at.length ? at[0] : Infinity;
    // What was seen of an earlier head stays in view.
    points = points.filter(([when]) => when < first).concat(at.map((when, i) => [when, per_second[i], mean_return[i]]));
    if (moment && moment.status.epoch !== data.moment.status.epoch) events.tell(Date.now(), "another head answers: it was restarted");
    show(data.moment);
  },
  moment: show,
  bye(data) {
    byeReason = data.reason ? `the head ended: ${data.reason}` : "the head ended";
  },
  away,
  refused,
});

function show(news) {
  const before = moment?.status.phase;
  moment = { ...news, workers: news.workers ?? moment?.workers ?? [] };
  const { status } = moment;
  setText($("job"), status.namespace && status.namespace !== "default" ? `${status.namespace}/${status.job}` : status.job);
  showPhase(status.phase, status.phase);
  if (before !== undefined && before !== status.phase) say(`${status.job}: ${status.phase}.`);
  document.title = `${status.job}: ${status.phase}`;
  setText($("epoch"), status.epoch);
  setText($("since"), clock(status.started_at));
  showTiles(status);
  showPause(status, moment.spec_paused);
  const shown = moment.workers.slice(0, MOST_WORKERS);
  workers.show(shown);
  const left = moment.workers.length - shown.length;
  setText($("more-workers"), left > 0 ? `And ${count(left)} more: GET /v1/workers lists them.` : "");
  eyes.workers(moment.workers.map((worker) => worker.id));
  weights.show(moment.updates);
  events.add(moment.events);
  const now = Date.parse(moment.time) / 1000;
  if (!points.length || now - points[points.length - 1][0] > 0.5) points.push([now, status.frames.per_second, status.episodes.mean_return]);
  points = points.filter(([at]) => at > now - KEPT_S);
  showPlots();
}

function showPhase(name, text) {
  $("phase").dataset.phase = name;
  setText($("phase"), text);
}

function showTiles(status) {
  const { frames, episodes, weights: fresh, groups, queue } = status;
  const lag = fresh.version - fresh.min_applied_version;
  const [ready, desired] = groups.reduce((sum, group) => [sum[0] + group.ready, sum[1] + group.desired], [0, 0]);
  const texts = {
    fps: count(frames.per_second),
    frames: count(frames.collected),
    target: frames.target === null ? "" : `of ${count(frames.target)} (${((100 * frames.collected) / (frames.target || 1)).toFixed(1)} %)`,
    return: number(episodes.mean_return),
    episodes: `${count(episodes.count)} episodes` + (episodes.mean_length === null ? "" : `, ${number(episodes.mean_length)} frames long`),
    version: `${fresh.version}`,
    lag: lag ? `the slowest worker is ${lag} behind` : "acts everywhere",
    crew: `${ready} of ${desired}`,
    restarts: status.restarts ? `${count(status.restarts)} restarted` : "",
    queue: queue.capacity ? `${queue.waiting + queue.ready} of ${queue.capacity}` : "none",
    lent: queue.capacity ? `${queue.lent} with consumers` : "frames go to the dataset",
  };
  for (const [id, text] of Object.entries(texts)) setText($(id), text);
}

function showPlots() {
  const seconds = Number($("window").value);
  const now = points.length ? points[points.length - 1][0] : Date.now() / 1000;
  plots.fps.show(points.map(([at, rate]) => [at, rate]), { seconds, now });
  plots.return.show(points.map(([at, , value]) => [at, value]), { seconds, now });
}

// -- pausing ---------------------------------------------------------------------------------------------------

const holdsPause = () => moment.status.pauses.some((lease) => lease.owner === OWNER);

function showPause(status, isSpecPaused) {
  const mayWrite = role !== "read";
  setText($("pause"), holdsPause() ? "Resume" : "Pause");
  $("pause").setAttribute("aria-disabled", String(!mayWrite));
  const states = { running: "", draining: "Stopping: not every worker stands still yet.", paused: "The fleet stands still." };
  const why = isSpecPaused ? " The manifest pauses it: set spec.paused to false to go on." : "";
  const may = mayWrite ? "" : " This is the read token; pausing needs the write token.";
  setText($("pause-help"), `${states[status.pause_state]}${why}${may}`.trim());
  const known = status.pauses.map((lease) => `${lease.id} ${lease.expires_at} ${mayWrite}`).join();
  if ($("leases").dataset.known === known) return;
  $("leases").dataset.known = known;
  $("leases").replaceChildren(...status.pauses.map((lease) => leaseItem(lease, mayWrite)));
}

function leaseItem(lease, mayWrite) {
  const item = document.createElement("li");
  item.append(`Paused by ${lease.owner} until ${clock(lease.expires_at)}${lease.reason ? `: ${lease.reason}` : ""}`);
  if (mayWrite && lease.owner !== OWNER) {
    const button = item.appendChild(document.createElement("button"));
    button.type = "button";
    button.textContent = "End";
    button.setAttribute("aria-label", `End the pause of ${lease.owner}`);
    button.addEventListener("click", () => ask("end the pause", `v1/pauses/${encodeURIComponent(lease.id)}`, { method: "DELETE" }));
  }
  return item;
}

async function ask(what, path, options) {
  setText($("trouble"), "");
  try {
    await call(path, options);
  } catch (error) {
    setText($("trouble"), `Could not ${what}: ${error.message}.`);
  }
}

$("pause").addEventListener("click", () => {
  if (!moment) return;
  if (role === "read") setText($("trouble"), "Could not do that: this is the read token; pausing needs the write token.");
  else if (holdsPause()) ask("resume", "v1/resume", { method: "POST", body: { owner: OWNER } });
  else ask("pause", "v1/pause", { method: "POST", body: { owner: OWNER, reason: "from the live page", ttl_seconds: PAUSE_S, wait_seconds: 0 } });
});

// -- the way to the head ---------------------------------------------------------------------------------------

function away(problem, until) {
  clearInterval(countdown);
  const isStarting = problem.kind === "no-workers";
  if (!isAway && moment) say("Disconnected.");
  isAway = true;
  if (isStarting) showPhase("Starting", "Starting");
  else showPhase("Away", "Disconnected");
  $("retry").hidden = false;
  const hint = problem.status === 0 ? " If this is a port-forward, it may have ended with the pod: start it again." : "";
  const what = byeReason || problem.message;
  const tick = () => {
    const left = Math.max(0, Math.ceil((until - Date.now()) / 1000));
    setText($("link-text"), `${what[0].toUpperCase()}${what.slice(1)}. Trying again ${left ? `in ${left} s` : "now"}.${isStarting ? "" : hint}`);
  };
  tick();
  countdown = setInterval(tick, 1000);
}

function refused(problem) {
  clearInterval(countdown);
  eyes.stop();
  const had = token.get();
  token.forget();
  let sentence = "";
  if (had && hasWorked) sentence = "The head does not know this token any more: the job was restarted with other tokens, or is another one. Enter its present token.";
  else if (had) sentence = `The head refuses this token: ${problem.message}. Check that it is one of this job's, whole and without its JSON.`;
  hasWorked = false;
  setText($("link-text"), "Waiting for a token");
  showPhase("", "Locked");
  showDoor(true, sentence);
}

function showDoor(isShown, sentence = "") {
  $("door").hidden = !isShown;
  $("board").hidden = isShown;
  $("retry").hidden = true;
  $("forget").hidden = isShown || !token.get();
  setText($("door-error"), sentence);
  setText($("trouble"), "");
  if (isShown) {
    $("token").value = "";
    $("token").setAttribute("aria-invalid", String(Boolean(sentence)));
    $("token").focus();
    if (sentence) say(sentence);
  }
}

const say = (text) => setText($("said"), text);

$("door-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    refusedHere("A token has no spaces and no special characters: paste one token, without its JSON.");
    return;
  }
  token.set(given);
  setText($("said"), "");
  stream.start();
});

function refusedHere(sentence) {
  token.forget();
  showDoor(true, sentence);
}

$("forget").addEventListener("click", () => {
  stream.stop();
  token.forget();
  hasWorked = false;
  refused(new Problem(401, ""));
});
$("retry").addEventListener("click", () => stream.retry());
$("window").addEventListener("change", showPlots);
stream.start();
