import { defineConfig } from "vite";

// The built files are committed and shipped in the wheel. The shell is served at "/" of any path
// prefix, so that every address in it is relative ("./").
export default defineConfig({
  base: "./",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "static",
    assetsDir: "ui",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  // `npm run dev` beside a server on port 8000.
  server: { proxy: { "/v1": process.env.ENVSERVER_URL ?? "http://127.0.0.1:8000" } },
});
