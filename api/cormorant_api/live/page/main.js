// Puts the page together: the stream's news go to the parts that show them.

import { Problem, call, token } from "./api.js";
import { Preview } from "./preview.js";
import { Events } from "./events.js";
import { clock, count, duration, number, percent, words } from "./format.js";
import { Learners } from "./learners.js";
import { Log } from "./log.js";
import { Plot } from "./plot.js";
import { Rows, setText } from "./rows.js";
import { Shares } from "./shares.js";
import { Stream } from "./stream.js";
import { Weights } from "./weights.js";

const OWNER = "page";
const PAUSE_S = 3600;
const MOST_WORKERS = 200;
const MOST_POINTS = 6000;
const SHORTEST_S = 10;

const $ = (id) => document.getElementById(id);
const plots = {
  fps: new Plot($("plot-fps"), { name: "Frames per second", format: (value) => `${count(value)} frames per second` }),
  return: new Plot($("plot-return"), { name: "Mean episode return", format: (value) => `return ${number(value)}` }),
  length: new Plot($("plot-length"), { name: "Mean episode length", format: (value) => `${number(value)} frames` }),
  staleness: new Plot($("plot-staleness"), { name: "Version lag", format: (value) => `${Number(value.toFixed(2))} ${value === 1 ? "version" : "versions"} behind` }),
};
const shares = new Shares($("plot-shares"), [
  { key: "env", name: "environment" },
  { key: "inference", name: "policy" },
  { key: "transfer", name: "copies" },
  { key: "weights", name: "weights" },
  { key: "store", name: "storing" },
  { key: "idle", name: "waiting" },
  { key: "paused", name: "paused" },
  { key: "build", name: "building" },
]);
const workers = new Rows($("workers"), (worker) => worker.id, [
  { text: (worker) => worker.id },
  { text: (worker) => worker.phase },
  { text: (worker) => (worker.version < 0 ? "–" : `${worker.version}`), isNumber: true },
  { text: (worker) => `${worker.lag}`, isNumber: true, warns: (worker) => worker.lag > 1 },
  { text: (worker) => count(worker.per_second), isNumber: true },
  { text: (worker) => count(worker.frames), isNumber: true },
  { text: (worker) => `${worker.attempt}`, isNumber: true },
  { text: (worker) => count(worker.env_restarts), isNumber: true, warns: (worker) => worker.env_restarts > 0 },
]);
const weights = new Weights($("updates"), $("no-updates"));
const events = new Events($("events"), $("no-events"));
const log = new Log($("log"), $("log-loud"), $("no-log"));
const learners = new Learners($("learners"), $("no-learners"), $("learners-note"));
const preview = new Preview({
  details: $("preview"), worker: $("preview-worker"), env: $("preview-env"), canvas: $("preview-canvas"), note: $("preview-note"),
});

let role = "read";
let moment = null;
let points = []; // samples as the head sends them, oldest first
let began = 0; // of this head's samples; those of an earlier head may stand before it
let hasWorked = false; // with the present token
let isAway = false;
let byeReason = "";
let endState = "";
let countdown;

const listener = {
  hello(data) {
    role = data.role;
    hasWorked = true;
  },
  connected() {
    clearInterval(countdown);
    showSignIn(false);
    $("retry").hidden = true;
    setText($("link-text"), "Live");
    setText($("trouble"), "");
    if (isAway) say("Connected again.");
    isAway = false;
    byeReason = endState = "";
  },
  opening(data) {
    $("preview-card").hidden = !data.picture;
    preview.offer(data.num_envs);
    const history = samplesOf(data.history);
    const first = history.length ? history[0].at : Infinity;
    began = history[0]?.at ?? 0;
    // What was seen of an earlier head stays in view.
    points = points.filter(({ at }) => at < first).concat(history);
    if (moment && moment.status.epoch !== data.moment.status.epoch) {
      events.tell(Date.now(), "the head was restarted");
      log.restart();
    }
    setText($("manifest"), data.manifest);
    show(data.moment);
  },
  moment: show,
  bye(data) {
    endState = data.state;
    byeReason = { "": "the head ended", Stopped: "the head stopped, and another one may continue the job" }[endState] ?? `the job has ${endState.toLowerCase()}`;
    if (data.reason) byeReason += `: ${data.reason}`;
  },
  away,
  refused,
};
const stream = new Stream(listener);

function show(news) {
  const before = moment && wordOf(moment.status);
  moment = { ...news, workers: news.workers ?? moment?.workers ?? [] };
  const { status } = moment;
  const word = wordOf(status);
  setText($("job"), status.namespace && status.namespace !== "default" ? `${status.namespace}/${status.job}` : status.job);
  showPhase(word === status.phase ? word : "Waiting", word);
  showTrouble(failingOf(status) || waitOf(status));
  if (before && before !== word) say(`${status.job}: ${word}.`);
  setText($("epoch"), status.epoch);
  setText($("since"), clock(status.started_at));
  showTiles(status);
  showPause(status, moment.spec_paused);
  const shown = moment.workers.slice(0, MOST_WORKERS);
  workers.show(shown);
  const left = moment.workers.length - shown.length;
  setText($("more-workers"), left > 0 ? `${count(left)} more: see GET /v1/workers.` : "");
  preview.workers(moment.workers.map((worker) => worker.id));
  weights.show(moment.updates);
  events.add(moment.events);
  log.add(moment.logs);
  learners.show(status, Date.parse(moment.time) / 1000);
  if (moment.sample && (!points.length || moment.sample.at > points[points.length - 1].at)) points.push(moment.sample);
  if (points.length > MOST_POINTS) points = points.filter((_, i) => i > MOST_POINTS / 2 || i % 2 === 0);
  showPlots();
  if (!endState && status.phase === "Completed") listener.bye({ state: status.phase, reason: "" }); // its head may stay for a while
  if (endState) showEnd();
}

/** Why a running job collects nothing; empty while it collects. */
function waitOf(status) {
  const progress = status.conditions.find((condition) => condition.type === "Progressing");
  return status.phase === "Running" && progress?.reason.startsWith("WaitingFor") ? progress.message : "";
}

/** Why environments of a running job keep failing, with the first traceback; empty while they do not. */
function failingOf(status) {
  const failing = status.conditions.find((condition) => condition.type === "EnvironmentsFailing");
  return status.phase === "Running" && failing?.status === "True" ? failing.message : "";
}

/** The phase in a word. A fault is told before a wait: a full queue does not make it go away. */
const wordOf = (status) => (failingOf(status) ? "Environments fail" : waitOf(status) ? "Waiting" : status.phase);

/** The last numbers stand there, and newer ones are out of reach. */
const isStale = () => isAway && !endState;

/** Nothing is stepped, whatever the rate over the last ten seconds says. */
const isStill = ({ phase, pause_state: state }) => Boolean(endState) || state === "paused" || ["Completed", "Failed"].includes(phase);

/** Columns as rows. */
function samplesOf(history) {
  return history.at.map((at, i) => Object.fromEntries(Object.entries(history).map(([name, column]) => [name, name === "at" ? at : column[i]])));
}

/** A sentence, and below it the traceback that it may have. */
function showTrouble(text) {
  const [sentence, ...traceback] = text.split("\n");
  setText($("waiting"), sentence);
  setText($("traceback"), traceback.join("\n"));
  $("traceback").hidden = !traceback.length;
}

function showPhase(name, text) {
  $("phase").dataset.phase = name;
  setText($("phase"), text);
  if (moment) document.title = `${moment.status.job}: ${text}`;
}

function showTiles(status) {
  const { frames, episodes, weights: fresh, groups, queue } = status;
  const lag = fresh.version - fresh.min_applied_version;
  const [ready, desired] = groups.reduce((sum, group) => [sum[0] + group.ready, sum[1] + group.desired], [0, 0]);
  const texts = {
    fps: count(endState ? meanOf(status) : isStill(status) ? 0 : frames.per_second),
    "fps-mean": endState ? "on average" : "",
    frames: count(frames.collected),
    target: frames.target === null ? "" : `of ${count(frames.target)} (${((100 * frames.collected) / (frames.target || 1)).toFixed(1)} %)${isStill(status) || isStale() ? "" : leftOf(status)}`,
    dropped: Object.entries(frames.dropped).filter(([, lost]) => lost).map(([why, lost]) => `${count(lost)} dropped (${words(why)})`).join(", "),
    return: number(episodes.mean_return),
    episodes: `${count(episodes.count)} episodes` + (episodes.mean_length === null ? "" : `, ${number(episodes.mean_length)} frames long`),
    version: `${fresh.version}`,
    lag: lag ? `the slowest worker is ${lag} behind` : "applied by all workers",
    "worker-count": `${ready} of ${desired}`,
    restarts: status.restarts ? `${count(status.restarts)} restarted` : "",
    queue: `${Math.min(queue.waiting, queue.capacity)} of ${queue.capacity}`,
    lent: aroundQueue(queue),
  };
  for (const [id, text] of Object.entries(texts)) setText($(id), text);
  setText($("frames-title"), status.counts === "episodes" ? "Episodes played" : "Frames collected");
  $("queue-tile").hidden = $("learners-card").hidden = !queue.capacity;
  $("workers-tile").hidden = $("workers-card").hidden = Boolean(endState) && !moment.workers.length;
  $("weights-card").hidden = Boolean(endState) && !moment.updates.length;
  setText($("now-title"), endState ? "At the end" : isStale() ? `Last seen at ${clock(moment.time)}` : "Now");
  $("main").toggleAttribute("data-stale", isStale());
  showStatistics(Object.entries(status.statistics ?? {}));
  showServers(Object.entries(status.inference ?? {}));
  const metrics = Object.entries(episodes.metrics ?? {});
  $("metrics-tile").hidden = !metrics.length;
  const tasks = Object.entries(episodes.tasks ?? {});
  $("tasks-tile").hidden = !tasks.length;
  setText($("tasks"), tasks.map(([name, { means }]) => `${name} ${number(means.return)}`).join(", "));
  setText($("metrics"), metrics.map(([name, value]) => `${name} ${number(value)}`).join(", "));
}

/** What observations and returns are normalized with: how much it is made of, and whether the scales are sane. */
function showStatistics(found) {
  $("statistics-tile").hidden = !found.length;
  if (!found.length) return;
  const { frames, published_frames: published } = found[0][1];
  setText($("statistics"), `${count(frames)} frames`);
  const ranges = found.map(([key, { mean, std }]) => `${key}: mean ${number(mean[0])} to ${number(mean[1])}, std ${number(std[0])} to ${number(std[1])}`);
  setText($("statistics-ranges"), [`the policy acts with ${count(published)}`, ...ranges].join("; "));
}

/** What inference servers did in the last seconds: how fast, how full their batches were, and who waited for whom. */
function showServers(found) {
  $("servers-tile").hidden = !found.length;
  setText($("servers"), `${count(found.reduce((sum, [, served]) => sum + served.rows_per_second, 0))} rows/s`);
  const details = found.map(([group, served]) => {
    const padding = served.padding ? ` and ${percent(served.padding)} padding` : "";
    return `${group}: ${number(served.rows_per_act)} rows per act${padding}, wait ${number(served.wait_ms)} ms, act ${number(served.act_ms)} ms, busy ${percent(served.busy)}`;
  });
  setText($("servers-detail"), details.join("; "));
}

/** Batches outside the queue: finished but without room, returned, with learners. */
function aroundQueue({ waiting, capacity, ready, lent }) {
  const behind = waiting > capacity ? `${waiting - capacity} waiting for room, ` : "";
  return `${behind}${ready ? `${ready} returned, ` : ""}${lent} with learners`;
}

/** Frames per second since the first worker of this head was ready. */
function meanOf(status) {
  const last = points.findLastIndex((p) => Object.keys(p.time_shares).length); // while workers worked; the head may have stayed
  const ended = (last >= 0 && points[last + 1]?.at) || Date.parse(moment.time) / 1000;
  return status.frames.stepped / Math.max(1, ended - began);
}

function leftOf({ counts, frames, episodes }) {
  const left = (frames.target - frames.collected) * (counts === "episodes" ? episodes.mean_length : 1);
  return left > 0 && frames.per_second > 0 ? `, about ${duration(left / frames.per_second)} left` : "";
}

function showPlots() {
  const now = points.length ? points[points.length - 1].at : Date.now() / 1000;
  const chosen = $("window").value === "all" ? Infinity : Number($("window").value);
  const seconds = Math.min(chosen, Math.max(endState ? 1 : SHORTEST_S, now - (points[0]?.at ?? now))); // a young job fills its plots
  const span = { seconds, now };
  plots.fps.show(points.map((p) => [p.at, p.per_second]), span);
  plots.return.show(points.map((p) => [p.at, p.mean_return, p.return_low, p.return_high]), span);
  plots.length.show(points.map((p) => [p.at, p.mean_length]), span);
  $("plot-staleness").hidden = !moment?.status.weights.version && !points.some((p) => p.staleness);
  plots.staleness.show(points.map((p) => [p.at, p.staleness]), span);
  shares.show(points.map((p) => [p.at, p.time_shares]), { ...span, isTotal: Boolean(endState) });
}

// -- pausing ---------------------------------------------------------------------------------------------------

const holdsPause = () => moment.status.pauses.some((lease) => lease.owner === OWNER);

function showPause(status, isSpecPaused) {
  const mayWrite = role !== "read" && !endState;
  setText($("pause"), holdsPause() ? "Resume" : "Pause");
  $("pause").setAttribute("aria-disabled", String(!mayWrite));
  const states = { running: "", draining: "Pausing: some workers are still stepping.", paused: "All workers are paused." };
  const why = isSpecPaused ? " spec.paused is true: set it to false to resume." : "";
  const may = mayWrite ? "" : " This is the read token; pausing needs the write token.";
  setText($("pause-help"), endState ? "The job no longer runs." : `${states[status.pause_state]}${why}${may}`.trim());
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
  if (!moment || endState) return;
  if (role === "read") setText($("trouble"), "This is the read token; pausing needs the write token.");
  else if (holdsPause()) ask("resume", "v1/resume", { method: "POST", body: { owner: OWNER } });
  else ask("pause", "v1/pause", { method: "POST", body: { owner: OWNER, reason: "from the live page", ttl_seconds: PAUSE_S, wait_seconds: 0 } });
});

/** `#token=...` in the address, as `cormorant run --serve` prints it: read once and removed from the address bar. */
function takeTokenFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return false;
  token.set(given);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

// -- connection ---------------------------------------------------------------------------------------

function away(problem, until) {
  clearInterval(countdown);
  const isStarting = problem.kind === "no-workers";
  if (!isAway && moment) say(endState ? `${moment.status.job}: ${endState}.` : "Disconnected.");
  isAway = true;
  if (endState) showEnd();
  else if (isStarting) showPhase("Starting", "Starting");
  else showPhase("Away", "Disconnected");
  if (moment) showTiles(moment.status);
  if (endState && endState !== "Stopped") return;
  $("retry").hidden = false;
  const hint = problem.status === 0 && !endState ? " If this is a port-forward, it may have ended with the pod: start it again." : "";
  const what = byeReason || problem.message;
  const tick = () => {
    const left = Math.max(0, Math.ceil((until - Date.now()) / 1000));
    setText($("link-text"), `${sentence(what)} Retrying ${left ? `in ${left} s` : "now"}.${isStarting ? "" : hint}`);
  };
  tick();
  countdown = setInterval(tick, 1000);
}

/** The end is an event: the last numbers and plots stay, and nothing can be paused. */
function showEnd() {
  showPhase(endState, endState);
  setText($("link-text"), sentence(byeReason));
  showTrouble("");
  if (!moment) return;
  showTiles(moment.status);
  showPlots();
  showPause(moment.status, false);
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function refused(problem) {
  clearInterval(countdown);
  preview.stop();
  const had = token.get();
  token.forget();
  let reason = "";
  if (had && hasWorked) reason = "The head no longer accepts this token: the job was restarted with other tokens, or this is another job. Enter a current token.";
  else if (had) reason = `The head refused this token: ${problem.message}. Paste one complete token of this job, without the JSON around it.`;
  hasWorked = false;
  setText($("link-text"), "Waiting for a token");
  showPhase("", "Locked");
  showSignIn(true, reason);
}

function showSignIn(isShown, reason = "") {
  $("sign-in").hidden = !isShown;
  $("board").hidden = isShown;
  $("retry").hidden = true;
  $("forget").hidden = isShown || !token.get();
  setText($("sign-in-error"), reason);
  setText($("trouble"), "");
  if (isShown) {
    $("token").value = "";
    $("token").setAttribute("aria-invalid", String(Boolean(reason)));
    $("token").focus();
    if (reason) say(reason);
  }
}

const say = (text) => setText($("said"), text);

$("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    refusedHere("A token has no spaces or special characters: paste one token, without its JSON.");
    return;
  }
  token.set(given);
  setText($("said"), "");
  stream.start();
});

function refusedHere(reason) {
  token.forget();
  showSignIn(true, reason);
}

$("forget").addEventListener("click", () => {
  stream.stop();
  token.forget();
  hasWorked = false;
  refused(new Problem(401, ""));
});
$("retry").addEventListener("click", () => stream.retry());
$("window").addEventListener("change", showPlots);

/** A report is this page with its data inside: no head, nothing to ask or to pause. */
function showReport({ opening, state, reason, versions, made_at: made }) {
  document.documentElement.dataset.report = "";
  $("window").value = "all";
  listener.opening(opening);
  listener.bye({ state, reason });
  if (endState) showEnd();
  showSignIn(false);
  setText($("versions"), Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", "));
  setText($("made"), `Report of ${new Date(made).toLocaleString("en-GB")}.`);
}

if ($("report")) showReport(JSON.parse($("report").textContent));
else {
  window.addEventListener("hashchange", () => takeTokenFromAddress() && stream.start());
  takeTokenFromAddress();
  stream.start();
}
