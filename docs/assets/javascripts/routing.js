// The routing playground: logits in, choices, weights and losses out. The rules of the conventions and the settings of
// the families come from the package through the page; `compute` is the one copy of its arithmetic outside Python, and
// a test compares the two.
(() => {
  const TOKENS = 8, EXPERTS = 8, LENGTH = 4
  const SCORE_FNS = ["softmax", "sigmoid", "sqrtsoftplus"]
  const GROUP_SCORES = ["top2_sum", "max"]
  const PRIORITIES = ["arrival", "tokens", "probability"]
  const range = (n) => Array.from({ length: n }, (_, i) => i)
  const sum = (values) => values.reduce((total, value) => total + value, 0)
  const order = (values) => range(values.length).sort((a, b) => values[b] - values[a] || a - b)

  const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)))
  const logsumexp = (row) => {
    const top = Math.max(...row)
    return top + Math.log(sum(row.map((x) => Math.exp(x - top))))
  }
  const scoresOf = (row, scoreFn) => {
    if (scoreFn === "softmax") return row.map((x) => Math.exp(x - logsumexp(row)))
    if (scoreFn === "sigmoid") return row.map((x) => 1 / (1 + Math.exp(-x)))
    return row.map((x) => Math.sqrt(softplus(x)))
  }

  // top_k_routing of one token: its groups, choice and weights.
  const routeToken = (row, valid, o) => {
    const experts = row.length, size = experts / o.num_groups
    const scores = scoresOf(row, o.score_fn)
    const choice = scores.map((score, e) => score + (o.bias?.[e] ?? 0))
    const best = o.group_score === "top2_sum" ? 2 : 1
    const groups = range(o.num_groups).map((g) =>
      sum(choice.slice(g * size, (g + 1) * size).sort((a, b) => b - a).slice(0, best)))
    const keptGroups = order(groups).slice(0, o.num_groups > 1 ? o.top_k_groups : 1)
    const allowed = choice.map((value, e) => (keptGroups.includes(Math.floor(e / size)) ? value : -Infinity))
    const ids = order(allowed).slice(0, o.top_k)
    let weights = ids.map((e) => scores[e])
    if (o.norm_topk_prob) {
      const total = Math.max(sum(weights), Number.MIN_VALUE)
      weights = weights.map((weight) => weight / total)
    }
    weights = weights.map((weight) => weight * o.routed_scaling_factor)
    return {
      scores, groups, keptGroups,
      ids: valid ? ids : ids.map(() => experts),
      weights: valid ? weights : weights.map(() => 0),
    }
  }

  // ceil(tokens * k / E * factor), with the factor as the decimal that was typed: no rounding error lifts it by one.
  const capacityOf = (tokens, o, experts) => {
    const [whole, digits = ""] = o.capacity_factor.toFixed(6).split(".")
    const scale = 10n ** BigInt(digits.length), under = BigInt(experts) * scale
    const over = BigInt(tokens * o.top_k) * BigInt(whole + digits)
    return Math.min(Math.max(Number((over + under - 1n) / under), 1), tokens)
  }

  // apply_capacity: who comes first keeps a place; the others get the id E and weight 0.
  const drop = (rows, capacity, o, experts, size) => {
    const places = rows.flatMap((row, t) => row.ids.map((id, k) => ({ t, k, id, weight: row.weights[k] })))
    const rank = {
      arrival: (a, b) => a.k - b.k || a.t - b.t,
      tokens: (a, b) => a.t - b.t || a.k - b.k,
      probability: (a, b) => b.weight - a.weight || a.t - b.t || a.k - b.k,
    }[o.priority]
    const used = new Map(), kept = rows.map((row) => ({ ids: [...row.ids], weights: [...row.weights] }))
    for (const { t, k, id } of places.sort(rank)) {
      if (id >= experts) continue
      const queue = `${Math.floor(t / size)}:${id}`, before = used.get(queue) ?? 0
      used.set(queue, before + 1)
      if (before >= capacity) {
        kept[t].ids[k] = experts
        kept[t].weights[k] = 0
      }
    }
    return kept
  }

  const countsOf = (rows, experts, valid, choices = Infinity) => {
    const counts = Array(experts).fill(0)
    rows.forEach((row, t) => row.ids.slice(0, choices).forEach((id) => { if (valid[t] && id < experts) counts[id] += 1 }))
    return counts
  }

  // load_balancing_loss under one rule of the table of conventions.
  const loss = (rule, rows, keptRows, valid, experts, length, allCounts) => {
    const source = rule.counts === "kept" ? keptRows : rows
    const choices = rule.counts === "all" ? source[0].ids.length : 1
    const size = rule.over === "sequence" ? length : rows.length
    let total = 0, groups = 0
    for (let start = 0; start < rows.length; start += size) {
      const places = range(size).map((i) => start + i)
      const part = places.map((t) => source[t]), live = places.map((t) => valid[t])
      const counts = countsOf(part, experts, live, choices)
      const tokens = rule.counts === "kept" ? sum(counts) : live.filter(Boolean).length
      if (!tokens) continue
      groups += 1
      const fraction = rule.over === "global"
        ? allCounts.map((count) => (choices * count) / Math.max(sum(allCounts), 1))
        : counts.map((count) => count / tokens)
      const mean = range(experts).map((e) =>
        sum(places.map((t) => (valid[t] ? rows[t].scores[e] / sum(rows[t].scores) : 0))) / tokens)
      total += experts * sum(fraction.map((f, e) => f * mean[e]))
    }
    const value = total / Math.max(groups, 1)
    return rule.per === "token" ? value : value / choices
  }

  // Everything that the page shows, from logits (T x E) and options.
  const compute = (o, conventions) => {
    const experts = o.logits[0].length, tokens = o.logits.length
    const valid = o.logits.map((_, t) => !o.padding?.includes(t))
    const rows = o.logits.map((row, t) => routeToken(row, valid[t], o))
    const size = o.capacity_over === "sequence" ? o.length : tokens
    const capacity = o.capacity_factor > 0 ? capacityOf(size, o, experts) : null
    const kept = capacity === null ? rows : drop(rows, capacity, o, experts, size)
    const counts = countsOf(rows, experts, valid), keptCounts = countsOf(kept, experts, valid)
    const mean = sum(counts) / experts
    const squares = o.logits.map((row) => logsumexp(row) ** 2).filter((_, t) => valid[t])
    return {
      rows, kept, capacity, counts, keptCounts,
      losses: Object.fromEntries(Object.entries(conventions).map(([name, rule]) =>
        [name, loss(rule, rows, kept, valid, experts, o.length, counts)])),
      z_loss: sum(squares) / Math.max(squares.length, 1),
      max_violation: mean ? Math.max(...counts) / mean - 1 : 0,
      dropped: sum(counts) ? 1 - sum(keptCounts) / sum(counts) : 0,
    }
  }

  globalThis.guideRouting = { compute }

  // ------------------------------------------------------------------------------------------------- the page
  const LOGITS = {
    "A few favourites": (t, e) => Math.round((Math.sin(3 * t + 1.7 * e) * 1.5 + (e < 2 ? 1.5 : 0)) * 10) / 10,
    "Even": (t, e) => (e === t % EXPERTS ? 2 : e === (t + 1) % EXPERTS ? 1.5 : 0),
    "Collapsed": (_, e) => (e === 0 ? 3 : e === 1 ? 2.5 : 0),
    "Each sequence its own pair": (t, e) => {
      const first = 2 * Math.floor(t / LENGTH)
      return e === first ? 3 : e === first + 1 ? 2.5 : 0
    },
  }
  const OPTIONS = ["top_k", "score_fn", "norm_topk_prob", "routed_scaling_factor", "num_groups", "top_k_groups", "group_score"]
  const limits = (o) => {
    o.top_k = Math.min(Math.max(Math.round(o.top_k) || 1, 1), EXPERTS)
    o.num_groups = [1, 2, 4].includes(o.num_groups) ? o.num_groups : 1
    const least = Math.ceil(o.top_k / (EXPERTS / o.num_groups))
    o.top_k_groups = Math.min(Math.max(Math.round(o.top_k_groups) || 1, least), o.num_groups)
    return o
  }

  const start = (families) => ({
    family: Object.keys(families)[0], ...Object.values(families)[0],
    logits: range(TOKENS).map((t) => range(EXPERTS).map((e) => LOGITS["A few favourites"](t, e))),
    bias: Array(EXPERTS).fill(0), padding: [], length: LENGTH,
    capacity_factor: 0, capacity_over: "batch", priority: "arrival",
  })

  const read = (families) => {
    const o = start(families), query = new URLSearchParams(location.search)
    const finite = (text) => { const x = Number(text); return text !== "" && Number.isFinite(x) && Math.abs(x) <= 20 ? x : null }
    if (query.has("family") && families[query.get("family")]) Object.assign(o, { family: query.get("family") }, families[query.get("family")])
    const words = { score_fn: SCORE_FNS, group_score: GROUP_SCORES, priority: PRIORITIES, capacity_over: ["batch", "sequence"] }
    for (const [name, allowed] of Object.entries(words)) if (allowed.includes(query.get(name))) o[name] = query.get(name)
    for (const name of ["top_k", "routed_scaling_factor", "num_groups", "top_k_groups", "capacity_factor"])
      if (query.has(name) && finite(query.get(name)) !== null && finite(query.get(name)) >= 0) o[name] = finite(query.get(name))
    if (query.has("norm_topk_prob")) o.norm_topk_prob = query.get("norm_topk_prob") === "1"
    const numbers = (name, count) => {
      const values = (query.get(name) ?? "").split(" ").map(finite)
      return values.length === count && !values.includes(null) ? values : null
    }
    const flat = numbers("logits", TOKENS * EXPERTS)
    if (flat) o.logits = range(TOKENS).map((t) => flat.slice(t * EXPERTS, (t + 1) * EXPERTS))
    o.bias = numbers("bias", EXPERTS) ?? o.bias
    o.padding = (query.get("padding") ?? "").split(" ").filter((x) => /^[0-7]$/.test(x)).map(Number)
    return limits(o)
  }

  const write = (o, families) => {
    const query = new URLSearchParams({ family: o.family }), usual = start(families)
    for (const name of OPTIONS) {
      if (o[name] === families[o.family][name]) continue
      query.set(name, o[name] === true ? "1" : o[name] === false ? "0" : o[name])
    }
    for (const name of ["capacity_factor", "capacity_over", "priority"]) if (o[name] !== usual[name]) query.set(name, o[name])
    if (o.logits.flat().join() !== usual.logits.flat().join()) query.set("logits", o.logits.flat().join(" "))
    if (o.bias.some(Boolean)) query.set("bias", o.bias.join(" "))
    if (o.padding.length) query.set("padding", o.padding.join(" "))
    history.replaceState(history.state, "", `${location.pathname}?${query}${location.hash}`)
  }

  const python = (o) => {
    const bias = o.bias.some(Boolean)
    const options = OPTIONS.filter((name) => o.num_groups > 1 || !name.includes("group")).map((name) => {
      const value = o[name]
      return name === "top_k" ? `${value}` : `${name}=${value === true ? "True" : value === false ? "False" : typeof value === "string" ? `"${value}"` : value}`
    })
    if (bias) options.push(`expert_bias_E=torch.tensor([${o.bias.join(", ")}])`)
    if (o.padding.length) options.push("mask_T=mask_T")
    return [
      "import torch", "from guide_code.balance import load_balancing_loss", "from guide_code.routers import top_k_routing", "",
      "logits_TE = torch.tensor([", ...o.logits.map((row) => `    [${row.join(", ")}],`), "])",
      ...(o.padding.length ? [`mask_T = torch.tensor([${range(TOKENS).map((t) => (o.padding.includes(t) ? 0 : 1)).join(", ")}])`] : []),
      `routing = top_k_routing(logits_TE, ${options.join(", ")})`,
      ...(o.capacity_factor > 0 ? [
        "from guide_code.capacity import apply_capacity, expert_capacity", "",
        `capacity = expert_capacity(${o.capacity_over === "sequence" ? o.length : TOKENS}, ${EXPERTS}, ${o.top_k}, ${o.capacity_factor})`,
        `kept = apply_capacity(routing, capacity, priority="${o.priority}"${o.capacity_over === "sequence" ? `, group_size=${o.length}` : ""})`,
      ] : []),
      `print(load_balancing_loss(routing.scores, routing.ids${o.padding.length ? ", mask_T=mask_T" : ""}))`,
    ].join("\n")
  }

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag)
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value)
      else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value)
    }
    made.append(...children)
    return made
  }

  const build = (root, { conventions, families }) => {
    let o = read(families)
    const out = {}

    const field = (label, control) => element("label", { class: "tool-field" }, element("span", {}, label), control)
    const select = (name, values) => element("select", { name, onchange: (event) => set(name, event.target.value) },
      ...values.map((value) => element("option", { value }, value)))
    const number = (name, attributes) => element("input", {
      type: "number", name, ...attributes,
      oninput: (event) => { if (event.target.value !== "" && event.target.validity.valid) set(name, Number(event.target.value)) },
    })
    const controls = {
      family: element("select", { name: "family", onchange: (event) => { Object.assign(o, { family: event.target.value }, families[event.target.value]); show() } },
        ...Object.keys(families).map((name) => element("option", { value: name }, name))),
      top_k: number("top_k", { min: 1, max: EXPERTS, step: 1 }),
      score_fn: select("score_fn", SCORE_FNS),
      norm_topk_prob: element("input", { type: "checkbox", name: "norm_topk_prob", onchange: (event) => set("norm_topk_prob", event.target.checked) }),
      routed_scaling_factor: number("routed_scaling_factor", { min: 0, max: 20, step: "any" }),
      num_groups: element("select", { name: "num_groups", onchange: (event) => set("num_groups", Number(event.target.value)) },
        ...[1, 2, 4].map((value) => element("option", { value }, String(value)))),
      top_k_groups: number("top_k_groups", { min: 1, max: 4, step: 1 }),
      group_score: select("group_score", GROUP_SCORES),
      capacity_factor: number("capacity_factor", { min: 0, max: 8, step: 0.05, title: "0: no capacity" }),
      capacity_over: select("capacity_over", ["batch", "sequence"]),
      priority: select("priority", PRIORITIES),
    }
    const labels = {
      family: "Router of", top_k: "Choices per token", score_fn: "Scores", norm_topk_prob: "Weights sum to 1",
      routed_scaling_factor: "Weights times", num_groups: "Groups of experts", top_k_groups: "Groups kept",
      group_score: "A group's score", capacity_factor: "Capacity factor", capacity_over: "Capacity is of a",
      priority: "Who comes first",
    }
    const set = (name, value) => { o[name] = value; limits(o); show() }
    const setLogit = (t, e, value) => { (t < 0 ? o.bias : o.logits[t])[e] = value; show() }

    // One number of the table: typed, stepped with the arrow keys, or dragged up and down.
    const cell = (t, e) => {
      const name = t < 0 ? `bias of expert ${e}` : `logit of token ${t} for expert ${e}`
      const input = element("input", { type: "number", step: t < 0 ? 0.05 : 0.1, min: -20, max: 20, "aria-label": name,
        oninput: () => { if (input.value !== "" && input.validity.badInput === false && Math.abs(input.valueAsNumber) <= 20) setLogit(t, e, input.valueAsNumber) } })
      input.addEventListener("pointerdown", (down) => {
        if (down.pointerType === "touch") return
        const before = input.valueAsNumber || 0
        const move = (event) => {
          const steps = Math.round((down.clientY - event.clientY) / 4)
          if (!steps) return
          const value = Math.round((before + steps * Number(input.step)) * 100) / 100
          input.value = Math.min(Math.max(value, -20), 20)
          setLogit(t, e, input.valueAsNumber)
        }
        const end = () => { removeEventListener("pointermove", move); removeEventListener("pointerup", end) }
        addEventListener("pointermove", move)
        addEventListener("pointerup", end)
      })
      return input
    }
    const inputs = range(TOKENS).map((t) => range(EXPERTS).map((e) => cell(t, e)))
    const biases = range(EXPERTS).map((e) => cell(-1, e))
    const notes = range(TOKENS).map(() => range(EXPERTS).map(() => element("span", { class: "tool-note" })))
    const cells = inputs.map((row, t) => row.map((input, e) => element("td", {}, input, notes[t][e])))
    const paddings = range(TOKENS).map((t) => element("input", { type: "checkbox", "aria-label": `token ${t} is padding`,
      onchange: (event) => { o.padding = o.padding.filter((x) => x !== t); if (event.target.checked) o.padding.push(t); o.padding.sort(); show() } }))
    const loads = range(EXPERTS).map(() => element("td", { class: "tool-load" }))

    const table = element("table", { class: "tool-grid" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "token"),
        ...range(EXPERTS).map((e) => element("th", { scope: "col" }, `E${e}`)), element("th", { scope: "col" }, "pad"))),
      element("tbody", {},
        ...range(TOKENS).map((t) => element("tr", { class: t === LENGTH ? "tool-second" : false }, element("th", { scope: "row" }, String(t)), ...cells[t], element("td", {}, paddings[t])))),
      element("tfoot", {},
        element("tr", {}, element("th", { scope: "row" }, "bias"), ...biases.map((input) => element("td", {}, input)), element("td")),
        element("tr", {}, element("th", { scope: "row" }, "load"), ...loads, element("td"))))
    out.facts = element("p", { class: "tool-facts", "aria-live": "polite" })
    out.losses = element("tbody")
    out.python = element("code")
    root.replaceChildren(
      element("div", { class: "tool-controls" }, ...Object.entries(controls).map(([name, control]) => field(labels[name], control))),
      element("div", { class: "tool-controls" },
        ...Object.entries(LOGITS).map(([name, rule]) => element("button", { type: "button", class: "md-button",
          onclick: () => { o.logits = range(TOKENS).map((t) => range(EXPERTS).map((e) => rule(t, e))); show() } }, name)),
        element("button", { type: "button", class: "md-button", onclick: () => { o = start(families); show() } }, "Start again")),
      element("div", { class: "tool-scroll", tabindex: 0, role: "group", "aria-label": "logits, choices and load" }, table),
      out.facts,
      element("div", { class: "tool-scroll", tabindex: 0, role: "group", "aria-label": "load-balancing losses" },
        element("table", { class: "tool-losses" }, element("thead", {}, element("tr", {},
          ...["convention", "loss", "even", "as in"].map((text) => element("th", { scope: "col" }, text)))), out.losses)),
      element("details", {}, element("summary", {}, "The same in Python"), element("pre", { tabindex: 0 }, out.python)))

    const show = () => {
      write(o, families)
      for (const [name, control] of Object.entries(controls)) {
        if (control.type === "checkbox") control.checked = o[name]
        else if (document.activeElement !== control || Number(control.value) !== o[name]) control.value = o[name]
      }
      controls.top_k_groups.disabled = controls.group_score.disabled = o.num_groups === 1
      controls.capacity_over.disabled = controls.priority.disabled = !(o.capacity_factor > 0)
      const result = compute(o, conventions)
      const size = EXPERTS / o.num_groups
      range(TOKENS).forEach((t) => {
        const row = result.rows[t], kept = result.kept[t]
        paddings[t].checked = o.padding.includes(t)
        range(EXPERTS).forEach((e) => {
          const input = inputs[t][e], slot = row.ids.indexOf(e)
          if (document.activeElement !== input || input.valueAsNumber !== o.logits[t][e]) input.value = o.logits[t][e]
          const dropped = slot >= 0 && kept.ids[slot] !== e
          const inGroup = o.num_groups === 1 || row.keptGroups.includes(Math.floor(e / size))
          cells[t][e].className = [slot >= 0 && !dropped ? "tool-chosen" : dropped ? "tool-dropped" : "", inGroup ? "" : "tool-out",
            o.num_groups > 1 && e % size === 0 && e ? "tool-edge" : ""].filter(Boolean).join(" ")
          notes[t][e].textContent = dropped ? "dropped" : slot >= 0 ? `w ${row.weights[slot].toFixed(2)}` : row.scores[e].toFixed(2)
        })
      })
      biases.forEach((input, e) => { if (document.activeElement !== input || input.valueAsNumber !== o.bias[e]) input.value = o.bias[e] })
      const most = Math.max(...result.counts, 1)
      loads.forEach((load, e) => {
        const lost = result.counts[e] - result.keptCounts[e]
        load.replaceChildren(
          element("span", { class: "tool-bar", style: `--share: ${result.counts[e] / most}` }),
          element("span", { class: "tool-note" }, lost ? `${result.keptCounts[e]} + ${lost}` : String(result.counts[e])))
      })
      out.facts.textContent = [
        `Max violation ${result.max_violation.toFixed(2)}`, `z-loss ${result.z_loss.toFixed(3)}`,
        result.capacity === null ? "no capacity: nothing is dropped" : `capacity ${result.capacity}: ${(100 * result.dropped).toFixed(0)} % dropped`,
      ].join(" · ")
      out.losses.replaceChildren(...Object.entries(conventions).map(([name, rule]) => element("tr", {},
        element("td", {}, element("code", {}, name)), element("td", {}, result.losses[name].toFixed(4)),
        element("td", {}, String(rule.per === "token" ? (rule.counts === "all" ? o.top_k : 1) : 1)), element("td", {}, rule.source))))
      out.python.textContent = python(o)
    }
    show()
  }

  const root = document.getElementById("routing-tool")
  if (root) build(root, JSON.parse(document.getElementById("routing-data").textContent))
})()
