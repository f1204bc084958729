// "#/groups", "#/groups/ID", "#/groups/ID/N".

import { usePlace } from "../router";
import { GroupPage } from "./group";
import { Groups } from "./groups";
import { RolloutPage } from "./rollout";

export function GroupsRoutes() {
  const [, id, number] = usePlace().path;
  if (id === undefined) return <Groups />;
  if (number === undefined) return <GroupPage key={id} id={id} />;
  return /^\d+$/.test(number) ? <RolloutPage key={`${id}/${number}`} id={id} number={Number(number)} /> : <p>There is no such rollout.</p>;
}
