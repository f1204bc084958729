export function Overview() {
  return <p class="dim">Nothing here yet.</p>;
}
