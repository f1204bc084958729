import { readdirSync, readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const SERVER = process.env.ENVSERVER_URL ?? "http://127.0.0.1:8000";

// The built files are committed and shipped in the wheel. The shell is served at "/" of any path
// prefix, so that every address in it is relative ("./").
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  plugins: [licences()],
  build: {
    outDir: "static",
    assetsDir: "ui",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
    chunkSizeWarningLimit: 2000, // Swagger UI, on its own page
    rollupOptions: { input: ["index.html", "docs.html"] },
  },
  // `npm run dev` beside a server on port 8000.
  server: { proxy: { "/v1": SERVER, "/openapi.json": SERVER } },
});

/** Writes LICENSES.txt: the terms of every package of which something was built in. */
function licences(): Plugin {
  return {
    name: "licences",
    generateBundle(_, bundle) {
      const folders = new Set<string>();
      for (const file of Object.values(bundle)) {
        for (const id of file.type === "chunk" ? file.moduleIds : []) {
          const folder = /^.*\/node_modules\/(@[^/]+\/)?[^/]+/.exec(id)?.[0];
          if (folder) folders.add(folder);
        }
      }
      const texts = [...folders].sort().map((folder) => {
        const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
        const terms = readdirSync(folder).filter((file) => /^(licen[cs]e|notice)|es-bundle\.js\.LICENSE\.txt$/i.test(file));
        const parts = terms.sort().map((file) => readFileSync(`${folder}/${file}`, "utf8").trim());
        if (!parts.length) throw new Error(`${name} has no licence`);
        return [`${name} ${version} (${license})`, ...parts].join("\n\n");
      });
      const head = "The built page contains parts of these packages.";
      const source = [head, ...texts].join(`\n\n${"-".repeat(80)}\n\n`) + "\n";
      this.emitFile({ type: "asset", fileName: "LICENSES.txt", source });
    },
  };
}
