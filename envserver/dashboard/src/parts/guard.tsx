// A fault of a page's own leaves the menu, and says what it was.

import { Component, type ComponentChildren } from "preact";
import { visible } from "../text";

export class Guard extends Component<{ children: ComponentChildren }, { fault: string | null }> {
  override state = { fault: null as string | null };

  static override getDerivedStateFromError(error: unknown): { fault: string } {
    console.error(error);
    return { fault: String(error) };
  }

  override render() {
    const { fault } = this.state;
    if (fault === null) return <>{this.props.children}</>;
    return (
      <p class="bad" role="alert">
        This page has a fault of its own: {visible(fault)}. Its data are in the JSON of /v1.
      </p>
    );
  }
}
