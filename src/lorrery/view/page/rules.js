// What is wrong: rules over the model, each with its limits in its text, so that whoever reads a notice can check it.
//
// A rule is a function of the model that returns notices: {rule, severity, subject, title, why}. `subject` is what it
// concerns (an entity of the model, or null), whose body and row are marked; `why` states the rule. docs/orrery.md lists
// the rules.

import { clock, count, percent, plural, seconds, short } from './format.js';

export const STUCK_SECONDS = 10;
export const THRASH_SECONDS = 60;
export const SHARE_SECONDS = 30;
export const GROWTH_SECONDS = 30;
export const RECENT_SECONDS = 10;
const MANY = 3; // notices of one rule that are shown one by one; more are one notice

export const BAD = 'bad';
export const WARN = 'warn';

/** All notices for a model, the worst first. */
export function evaluate(model) {
  if (!model.frame) return [];
  const notices = RULES.flatMap((rule) => merged(rule(model)));
  return notices.sort((a, b) => (a.severity === BAD ? 0 : 1) - (b.severity === BAD ? 0 : 1));
}

function merged(notices) {
  if (notices.length <= MANY) return notices;
  const [first] = notices;
  const names = notices.slice(0, MANY).map((notice) => short(notice.subject.name, 20)).join(', ');
  return [{
    ...first, subjects: notices.map((notice) => notice.subject),
    title: `${plural(notices.length, first.subject.kind)} (${names} …): ${first.many}`,
  }];
}

// Nothing joins, though someone waits.
function stuckQueue(model) {
  const notices = [];
  for (const worker of model.workers) {
    const still = model.at - worker.joinedAt;
    if (worker.waiting && still >= STUCK_SECONDS && worker.oldest >= STUCK_SECONDS) {
      notices.push({
        rule: 'stuck queue', severity: BAD, subject: worker, many: 'requests wait and nothing is admitted',
        title: `${short(worker.name)} admits nothing: ${count(worker.waiting)} waiting, the first for ${seconds(worker.oldest)}`,
        why: `Requests wait, the first for ${STUCK_SECONDS} s or more, and none has joined the batch for ${STUCK_SECONDS} s`
          + ` (now ${seconds(still)}). KV is ${percent(worker.kvRatio)} full, ${count(worker.running)} run.`,
      });
    }
  }
  return notices;
}

function unplaced(model) {
  const waited = model.unplacedSince === null ? 0 : model.at - model.unplacedSince;
  if (waited < STUCK_SECONDS) return [];
  return [{
    rule: 'no worker', severity: BAD, subject: null,
    title: `${plural(model.unplaced, 'request')} without a worker for ${seconds(waited)}`,
    why: `Some request has been without a worker for ${STUCK_SECONDS} s. Workers attached: ${model.workers.length}.`,
  }];
}

function lostWorker(model) {
  return model.lost.map((worker) => ({
    rule: 'lost worker', severity: BAD, subject: worker, many: 'gone within the last minute',
    title: `${short(worker.name)} is gone, since ${clock(worker.lostAt)}`,
    why: 'A worker that was attached and not draining is no longer there. Shown for a minute; its requests are queued again.',
  }));
}

function lostShard(model) {
  return model.shards.filter((shard) => !shard.connected).map((shard) => ({
    rule: 'lost scheduler', severity: BAD, subject: { kind: 'shard', name: shard.address, key: shard.address }, many: 'not connected',
    title: `scheduler ${shard.address} is not connected`,
    why: 'The router has no stream to this scheduler. Its requests resume when it is back.',
  }));
}

// An adapter that is loaded again within a minute was evicted too early.
function thrash(model) {
  const notices = [];
  for (const adapter of model.adapters.values()) {
    const again = adapter.thrash.growth(THRASH_SECONDS, model.at);
    if (again > 0) {
      notices.push({
        rule: 'thrash', severity: WARN, subject: adapter, again, many: 'loaded again within a minute of leaving',
        title: `${short(adapter.name)} thrashes: loaded again ${count(again)} times in the last minute`,
        why: `An adapter was loaded again within ${THRASH_SECONDS} s of its eviction: more adapters are in use than fit`
          + ' (max_loras, or the adapters\' memory).',
      });
    }
  }
  return notices.sort((a, b) => b.again - a.again);
}

// Half of an equal share, for one who wants it, while another has more than that.
function unfairTenant(model) {
  const shares = tenantShares(model);
  const wanting = shares.filter((share) => share.demand > 0);
  if (wanting.length < 2 || model.at - model.startedAt < SHARE_SECONDS) return [];
  const equal = 1 / wanting.length;
  const most = wanting.reduce((a, b) => (b.share > a.share ? b : a));
  if (most.share <= equal) return [];
  return wanting
    .filter(({ tenant, demand, share }) => tenant.waitingSeries.mean(SHARE_SECONDS) >= 1 && tenant.waiting && tenant !== most.tenant
      && share < 0.5 * Math.min(demand, equal))
    .map(({ tenant, demand, share }) => ({
      rule: 'unfair share', severity: WARN, subject: tenant, many: 'far below their share',
      title: `${short(tenant.name)} gets ${percent(share)} of the tokens; ${short(most.tenant.name)} gets ${percent(most.share)}`,
      why: `It waits, and over ${SHARE_SECONDS} s got less than half of both its part of the requests (${percent(demand)}) and`
        + ` an equal share among ${wanting.length} tenants (${percent(equal)}).`,
    }));
}

/** Each tenant's part of the tokens and of the requests that run and wait, over the last SHARE_SECONDS. */
export function tenantShares(model) {
  const shares = [...model.tenants.values()].map((tenant) => ({
    tenant,
    tokens: tenant.tokens.growth(SHARE_SECONDS, model.at),
    requests: (tenant.runningSeries.mean(SHARE_SECONDS) || 0) + (tenant.waitingSeries.mean(SHARE_SECONDS) || 0),
  }));
  const tokens = shares.reduce((sum, share) => sum + share.tokens, 0);
  const requests = shares.reduce((sum, share) => sum + share.requests, 0);
  return shares.map((share) => ({
    tenant: share.tenant, share: tokens ? share.tokens / tokens : 0, demand: requests ? share.requests / requests : 0,
  }));
}

function growingQueue(model) {
  const before = model.series.queue.before(model.at - GROWTH_SECONDS);
  if (!(model.waiting >= before + Math.max(10, before / 2))) return [];
  const arrived = model.series.requests.growth(GROWTH_SECONDS, model.at);
  const ended = model.series.finished.growth(GROWTH_SECONDS, model.at);
  return [{
    rule: 'growing queue', severity: WARN, subject: null,
    title: `The queue grew from ${count(before)} to ${count(model.waiting)} in ${GROWTH_SECONDS} s`,
    why: `It grew by half, and by 10 or more, in ${GROWTH_SECONDS} s: ${count(arrived)} requests came and ${count(ended)} ended.`,
  }];
}

function preemption(model) {
  const notices = [];
  for (const worker of model.workers) {
    const number = worker.preempted.growth(RECENT_SECONDS, model.at);
    if (number > 0) {
      notices.push({
        rule: 'preemption', severity: WARN, subject: worker, many: 'preempt requests: KV is full',
        title: `${short(worker.name)} preempted ${plural(number, 'request')}: KV ${percent(worker.kvRatio)} full`,
        why: `A running request lost its KV memory to another within the last ${RECENT_SECONDS} s, and is computed again.`,
      });
    }
  }
  return notices;
}

function refusals(model) {
  const notices = [];
  for (const tenant of model.tenants.values()) {
    const refused = tenant.refused.growth(RECENT_SECONDS, model.at);
    if (refused > 0) {
      notices.push({
        rule: 'refusals', severity: WARN, subject: tenant, many: 'had requests refused',
        title: `${short(tenant.name)}: ${plural(refused, 'request')} refused in ${RECENT_SECONDS} s`,
        why: `A request was refused within the last ${RECENT_SECONDS} s; the events say why.`,
      });
    }
  }
  return notices;
}

function failedLoads(model) {
  const failed = model.events.filter((event) => event.kind === 'load_failed' && model.at - event.at < THRASH_SECONDS);
  if (!failed.length) return [];
  return [{
    rule: 'failed load', severity: BAD, subject: null,
    title: `${plural(failed.length, 'adapter load')} failed: ${failed[failed.length - 1].text}`,
    why: `A load failed within the last ${THRASH_SECONDS} s.`,
  }];
}

function idleBesideQueue(model) {
  const busiest = model.workers.reduce((a, b) => (b.waiting > (a?.waiting ?? 0) ? b : a), null);
  if (!busiest || busiest.oldest < STUCK_SECONDS) return [];
  return model.workers
    .filter((worker) => worker.state === 'ready' && !worker.running && !worker.waiting && model.at - worker.ranAt >= STUCK_SECONDS)
    .map((worker) => ({
      rule: 'idle worker', severity: WARN, subject: worker, many: `idle, while ${count(busiest.waiting)} wait at ${short(busiest.name)}`,
      title: `${short(worker.name)} is idle, while ${count(busiest.waiting)} wait at ${short(busiest.name)}`,
      why: `It has run nothing for ${STUCK_SECONDS} s, while a request has waited as long at another: placement does not use it.`,
    }));
}

const RULES = [
  lostShard, lostWorker, stuckQueue, unplaced, failedLoads, unfairTenant, thrash, growingQueue, preemption, idleBesideQueue, refusals,
];
