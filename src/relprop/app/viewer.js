// A photo, a heatmap and both in one, painted in the browser: <relprop-map data-view='{...}'>.
// What it paints is what relprop.heatmap.colorize and relprop.figure.glow paint; the tests compare the pixels.
// The same file serves the page and the report, which has no server.

(() => {
  const SIDE = 448;
  const look = { levels: 1, opacity: 0.9, colours: "auto" }; // one for all maps of the page, kept when they change

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const short = (v) => (v === 0 ? "0" : Math.abs(v) >= 0.01 && Math.abs(v) < 1000 ? v.toPrecision(3) : v.toExponential(2));

  // Heat Quantization by the paper's edges, rounded to the map's own precision before values are compared with them.
  function quantised(values, levels) {
    let low = Infinity, high = -Infinity;
    for (const v of values) { if (v < low) low = v; if (v > high) high = v; }
    if (levels < 2 || low === high) return values;
    const edges = new Float64Array(levels + 1);
    for (let i = 0; i <= levels; i++) edges[i] = Math.fround(low + ((high - low) * i) / levels);
    edges[0] = low; edges[levels] = high;
    return Float32Array.from(values, (v) => {
      let i = Math.min(levels, Math.max(0, Math.floor(((v - low) / (high - low)) * levels)));
      while (i < levels && edges[i + 1] <= v) i++;
      while (i > 0 && edges[i] > v) i--;
      return edges[i];
    });
  }

  // The colours of a map, (H * W * 3): as matplotlib looks them up.
  function coloured(values, limit, name) {
    const negative = values.some((v) => v < 0);
    const { table, diverging } = COLOURS[name === "auto" ? (negative ? "RdBu_r" : "viridis") : name];
    const lowest = negative || diverging ? -1 : 0;
    const out = new Uint8ClampedArray(values.length * 3);
    values.forEach((v, i) => {
      const position = (Math.min(limit, Math.max(-limit, v)) / limit - lowest) / (1 - lowest);
      const at = 3 * Math.min(255, Math.floor(position * 256));
      for (let c = 0; c < 3; c++) out[3 * i + c] = table[at + c];
    });
    return out;
  }

  class RelpropMap extends HTMLElement {
    static observedAttributes = ["data-view"];

    // A page that is redrawn may hand an element that is there already another view.
    attributeChangedCallback() {
      this.build();
    }

    connectedCallback() {
      this.changed = () => this.paint();
      document.addEventListener("relprop-look", this.changed);
    }

    disconnectedCallback() {
      document.removeEventListener("relprop-look", this.changed);
    }

    build() {
      const view = (this.view = JSON.parse(this.dataset.view));
      const root = (this.root = this.shadowRoot || this.attachShadow({ mode: "open" }));
      root.replaceChildren(make("style", {}, STYLE));
      this.photo = null;
      for (const map of view.maps) map.values = new Float32Array(bytes(map.values).buffer);
      this.at = view.maps.length - 1;
      this.canvases = {};
      this.panes = make("div", { class: "rp-panes" });
      this.panes.style.maxWidth = `${660 * view.panes.length}px`;
      for (const pane of view.panes) this.panes.append(this.pane(pane));
      this.status = make("output", { class: "rp-value", "aria-live": "polite" });
      root.append(...(view.maps.length > 1 ? [this.stops()] : []), this.panes, this.status);
      if (view.controls) root.append(this.controls());
      this.rest();
      if (!view.photo) return this.paint();
      const photo = new Image();
      photo.onload = () => { if (this.view === view) { this.photo = this.grey(photo); this.paint(); } };
      photo.src = view.photo;
    }

    get map() { return this.view.maps[this.at]; }

    pane(kind) {
      const { view } = this;
      if (kind === "photo") {
        const image = make("img", { src: view.photo, alt: view.alt, width: SIDE, height: SIDE });
        return this.framed(image, "photo");
      }
      const canvas = make("canvas", { width: SIDE, height: SIDE, role: "img", tabindex: "0" });
      this.canvases[kind] = canvas;
      return this.framed(canvas, view.captions[kind]);
    }

    framed(picture, caption) {
      const frame = make("div", { class: "rp-frame" }, picture, make("i", { class: "rp-mark", hidden: "" }));
      picture.addEventListener("pointermove", (event) => {
        const box = picture.getBoundingClientRect();
        this.point((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
      });
      picture.addEventListener("pointerleave", () => this.rest());
      picture.addEventListener("blur", () => this.rest());
      picture.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
        if (!step) return;
        event.preventDefault();
        const [x, y] = this.here || [0.5, 0.5];
        const far = event.shiftKey ? 8 : 1;
        const inside = (v) => Math.min(0.9999, Math.max(0, v));
        this.point(inside(x + (far * step[0]) / this.map.width), inside(y + (far * step[1]) / this.map.height));
      });
      const alone = this.view.panes.length === 1; // then there is a heading above
      return make("figure", {}, frame, ...(alone ? [] : [make("figcaption", {}, caption)]));
    }

    // Says what the map holds at a place, and marks it in all pictures.
    point(x, y) {
      const { width, height, values, total } = this.map;
      const column = Math.min(width - 1, Math.floor(x * width)), row = Math.min(height - 1, Math.floor(y * height));
      const v = this.shown[row * width + column];
      this.here = [x, y];
      const part = total ? `, ${short((100 * v) / total)} % of all` : "";
      this.status.textContent = `column ${column}, row ${row}: ${short(v)}${part}`;
      for (const mark of this.root.querySelectorAll(".rp-mark")) {
        mark.hidden = false;
        mark.style.left = `${(100 * (column + 0.5)) / width}%`;
        mark.style.top = `${(100 * (row + 0.5)) / height}%`;
      }
    }

    rest() {
      this.here = null;
      const hint = "Point at a picture, or reach it with Tab and use the arrow keys, to read the value there.";
      this.status.textContent = this.view.controls ? hint : "";
      for (const mark of this.root.querySelectorAll(".rp-mark")) mark.hidden = true;
    }

    slider(label, settings, start, say, change) {
      const input = make("input", { type: "range", ...settings });
      input.value = start;
      const said = make("span", { class: "rp-said" }, say(start));
      input.addEventListener("input", () => { change(Number(input.value)); said.textContent = say(Number(input.value)); });
      return make("label", { class: "rp-control" }, make("span", {}, label), input, said);
    }

    stops() {
      const { maps } = this.view;
      const say = (i) => `${maps[i].name} (${maps[i].width} x ${maps[i].height})`;
      const change = (i) => { this.at = i; this.paint(); this.rest(); };
      const settings = { min: 0, max: maps.length - 1, step: 1, class: "rp-stop" };
      return make("div", { class: "rp-controls" }, this.slider("from output to input", settings, this.at, say, change));
    }

    controls() {
      const set = (name) => (value) => { look[name] = value; document.dispatchEvent(new Event("relprop-look")); };
      const levels = this.slider("quantisation", { min: 1, max: 32, step: 1, class: "rp-levels" }, look.levels,
        (n) => (n < 2 ? "off" : `${n} levels`), set("levels"));
      const opacity = this.slider("opacity", { min: 0, max: 100, step: 5, class: "rp-opacity" }, 100 * look.opacity,
        (n) => `${n} %`, (n) => set("opacity")(n / 100));
      const select = make("select", { class: "rp-colours" });
      select.append(make("option", { value: "auto" }, "viridis, red and blue where signed"));
      for (const [name, { title }] of Object.entries(COLOURS)) select.append(make("option", { value: name }, title));
      select.value = look.colours;
      select.addEventListener("change", () => set("colours")(select.value));
      const colours = make("label", { class: "rp-control" }, make("span", {}, "colours"), select);
      return make("div", { class: "rp-controls" }, levels, opacity, colours);
    }

    grey(photo) {
      const canvas = make("canvas", { width: SIDE, height: SIDE });
      const context = canvas.getContext("2d", { willReadFrequently: true });
      context.imageSmoothingQuality = "high";
      context.drawImage(photo, 0, 0, SIDE, SIDE);
      const { data } = context.getImageData(0, 0, SIDE, SIDE);
      const grey = new Float64Array(SIDE * SIDE);
      // The weights of Pillow's convert("L").
      for (let i = 0; i < grey.length; i++)
        grey[i] = Math.floor((data[4 * i] * 19595 + data[4 * i + 1] * 38470 + data[4 * i + 2] * 7471 + 32768) / 65536);
      return grey;
    }

    paint() {
      const { map, view } = this;
      this.shown = quantised(map.values, look.levels);
      const heat = coloured(this.shown, map.limit, look.colours);
      for (const [kind, canvas] of Object.entries(this.canvases)) {
        const context = canvas.getContext("2d");
        const image = context.createImageData(SIDE, SIDE);
        const over = kind === "overlay" && this.photo;
        for (let y = 0, p = 0; y < SIDE; y++) {
          const row = Math.floor((y * map.height) / SIDE) * map.width;
          for (let x = 0; x < SIDE; x++, p++) {
            const i = row + Math.floor((x * map.width) / SIDE);
            const strength = over ? Math.min(1, Math.abs(this.shown[i]) / map.limit) ** 0.75 * look.opacity : 1;
            for (let c = 0; c < 3; c++)
              image.data[4 * p + c] = strength * heat[3 * i + c] + (over ? (1 - strength) * this.photo[p] : 0);
            image.data[4 * p + 3] = 255;
          }
        }
        context.putImageData(image, 0, 0);
        const how = look.levels < 2 ? "" : ` Quantised to ${look.levels} levels.`;
        const where = kind === "overlay" ? ", over the photo" : "";
        canvas.setAttribute("aria-label", `${view.captions.heat}${where}. ${map.alt}${how}`);
      }
      this.panes.dataset.painted = `${this.at} ${look.levels} ${look.opacity} ${look.colours}`;
      if (this.here) this.point(...this.here);
    }
  }

  for (const colours of Object.values(COLOURS)) colours.table = bytes(colours.table);
  if (!customElements.get("relprop-map")) customElements.define("relprop-map", RelpropMap);
  window.relprop = { quantised, coloured };
})();
