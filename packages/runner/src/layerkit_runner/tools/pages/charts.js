/* Draws the curves of a page with uPlot: cursors and zoom are linked, `log` switches the y axis.

   data.charts[name] = {title, unit, log, curves}: `log` is whether the y axis begins logarithmic. A curve
   is {run, label, dashed, faint, x, y, bad}: x holds the first step and then differences, all positive; y
   numbers or null (a gap); `bad` steps that are marked by a triangle. A mean is drawn over a `faint` curve.
   data.resumes has pairs of run and step, marked by a line. The run selects the color, and an unchecked
   `input[data-run=run]` hides its curves.
   A figure with `data-chart=name` (the macro `curves` of drawings.html.jinja) receives the chart. */
"use strict";
(() => {
  const { charts, resumes = [] } = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("figure[data-chart]")];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colorOf = (run) => color(`--c${run % 8}`);
  const isShown = ({ run }) => document.querySelector(`input[data-run="${run}"]`)?.checked ?? true;
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const whole = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));

  function text(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size >= 1e15 || (size < 1e-3 && size > 0)) return value.toExponential(2).replace(/\.?0+e/, "e");
    return size >= 1e4 ? compact.format(value) : String(+value.toPrecision(4));
  }

  let low = Infinity, high = -Infinity;
  for (const chart of Object.values(charts)) {
    for (const curve of chart.curves) {
      let sum = 0;
      curve.x = curve.x.map((step) => (sum += step));
      low = Math.min(low, curve.x[0], ...curve.bad);
      high = Math.max(high, sum, ...curve.bad);
    }
  }
  let shown = { min: low, max: Math.max(high, low + 1) };

  function zoom(range) {
    shown = range;
    figures.forEach((figure) => figure.plot.setScale("x", range));
  }

  function mark(plot, curves) {
    const { ctx, bbox } = plot, size = 5 * devicePixelRatio;
    const isInside = (left) => left >= bbox.left && left <= bbox.left + bbox.width;
    for (const [run, x] of resumes.filter(([run]) => isShown({ run }))) {
      const left = plot.valToPos(x, "x", true);
      ctx.fillStyle = colorOf(run);
      if (isInside(left)) ctx.fillRect(left, bbox.top, devicePixelRatio, bbox.height);
    }
    for (const curve of curves.filter(isShown)) {
      ctx.fillStyle = colorOf(curve.run);
      for (const left of curve.bad.map((x) => plot.valToPos(x, "x", true)).filter(isInside)) {
        ctx.beginPath();
        ctx.moveTo(left - size, bbox.top);
        ctx.lineTo(left + size, bbox.top);
        ctx.lineTo(left, bbox.top + 2 * size);
        ctx.fill();
      }
    }
  }

  function draw(figure) {
    const chart = charts[figure.dataset.chart], place = figure.querySelector("[role=img]");
    const isLog = figure.querySelector("button").ariaPressed === "true";
    const tables = chart.curves.map(({ x, y }) => [x, isLog ? y.map((v) => (v > 0 ? v : null)) : y]);
    const axis = {
      stroke: color("--soft"), font: "12px system-ui", labelFont: "12px system-ui", labelGap: 0,
      grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false },
      values: (_, values) => values.map(text),
    };
    const lastRun = Math.max(...chart.curves.map((curve) => curve.run));
    const last = (plot, series) => plot.data[series].findLast((v) => v != null);
    figure.plot?.destroy();
    figure.plot = new uPlot({
      width: place.clientWidth,
      height: figure.classList.contains("wide") ? 300 : 220,
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
      axes: [{ ...axis, size: 26, space: 70, incrs: whole, label: "step", labelSize: 18 }, { ...axis, size: 56 }],
      legend: { markers: { width: 3, dash: (plot, series) => (plot.series[series].dash ? "dotted" : "solid") } },
      series: [
        { label: "step", value: (plot, v) => (v ?? last(plot, 0))?.toLocaleString("en") },
        ...chart.curves.map((curve) => ({
          label: curve.label, class: curve.faint ? "faint" : "drawn",
          // A later run is drawn over an earlier one, which stays visible at its sides.
          width: curve.faint ? 1 : 1.75 + 1.5 * Math.min(lastRun - curve.run, 2),
          stroke: colorOf(curve.run) + (curve.faint ? "55" : ""), show: isShown(curve),
          dash: curve.dashed ? [6, 4] : undefined,
          points: { ...(curve.dashed && { show: true }), size: 5, fill: colorOf(curve.run) },
          value: (plot, v, series, index) => text(index == null ? last(plot, series) : v) || "–",
        })),
      ],
      cursor: {
        y: false, drag: { setScale: false },
        dataIdx: (plot, series, index) => { // the newest value up to the cursor
          while (index > 0 && plot.data[series][index] == null) index--;
          return index;
        },
        sync: { key: "step", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => zoom({ min: low, max: high }) },
      },
      hooks: {
        draw: [(plot) => mark(plot, chart.curves)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 4) zoom({ min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") });
          plot.setSelect({ left: 0, width: 0 }, false);
        }],
      },
    }, uPlot.join(tables), place);
    figure.plot.setScale("x", shown);
  }

  for (const figure of figures) {
    draw(figure);
    const button = figure.querySelector("button");
    button.onclick = () => { button.ariaPressed = String(button.ariaPressed !== "true"); draw(figure); };
    new ResizeObserver(() => {
      const { clientWidth } = figure.querySelector("[role=img]");
      if (clientWidth !== figure.plot.width) figure.plot.setSize({ width: clientWidth, height: figure.plot.height });
    }).observe(figure);
  }
  for (const box of document.querySelectorAll("input[data-run]")) box.onchange = () => figures.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").onchange = () => figures.forEach(draw);
})();
