"""tau2-bench's domain `mock`: a to-do list, and a customer with an inbox; as
src/tau2/domains/mock."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from .database import Record
from .toolkit import DatabaseRow, Toolkit, handover, tool
from .world import DomainKind, Side

TaskStatus = Literal["pending", "completed"]


class Task(BaseModel):
    task_id: str
    title: str
    description: str | None = None
    status: TaskStatus


class User(BaseModel):
    user_id: str
    name: str
    tasks: list[str]


class MockDB(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tasks: dict[str, Task]
    users: dict[str, User]


class Notification(BaseModel):
    model_config = ConfigDict(extra="forbid")

    notification_id: str
    message: str
    status: Literal["unread", "read"] = "unread"
    task_id: str | None = None


class MockUserDB(BaseModel):
    model_config = ConfigDict(extra="forbid")

    notifications: dict[str, Notification] = {}


class MockTools(Toolkit):
    @tool(
        "write",
        types={"description": str},
        user_id="Id of the user who gets the task.",
        title="Title of the task.",
        description="What the task is about; may be left out.",
    )
    def create_task(self, user_id: str, title: str, description: str | None = None) -> DatabaseRow:
        """Adds a task to the list of a user."""
        self._existing("users", user_id, "User {} not found")
        task_id = f"task_{len(self.db.table('tasks')) + 1}"
        task = Task(task_id=task_id, title=title, description=description, status="pending")
        record = task.model_dump()
        self.db.put("tasks", task_id, record)
        self.db.edit("users", user_id)["tasks"].append(task_id)
        return DatabaseRow(record)

    @tool("read")
    def get_users(self) -> list[DatabaseRow]:
        """Lists all users."""
        return [DatabaseRow(user) for user in self.db.rows("users")]

    @tool("write", task_id="Id of the task.", status="Its new status.")
    def update_task_status(self, task_id: str, status: TaskStatus) -> DatabaseRow:
        """Sets the status of a task."""
        self._existing("tasks", task_id, "Task {} not found")
        task = self.db.edit("tasks", task_id)
        task["status"] = status
        return DatabaseRow(task)

    def assert_number_of_tasks(self, user_id: str, expected_number: int) -> bool:
        return (
            len(self._existing("users", user_id, "User {} not found")["tasks"]) == expected_number
        )

    def assert_task_status(self, task_id: str, expected_status: str) -> Any:
        return self._existing("tasks", task_id, "Task {} not found")["status"] == expected_status

    @handover
    def transfer_to_human_agents(self, summary: str) -> str:
        return "Transfer successful"


class MockUserTools(Toolkit):
    @tool("read")
    def check_notifications(self) -> list[DatabaseRow]:
        """Shows all notifications of your inbox."""
        return [DatabaseRow(notification) for notification in self.db.rows("notifications")]

    @tool("write", notification_id="Id of the notification.")
    def dismiss_notification(self, notification_id: str) -> str:
        """Marks a notification as read."""
        self._notification(notification_id)
        self.db.edit("notifications", notification_id)["status"] = "read"
        return f"Notification {notification_id} dismissed"

    def add_notification(
        self, notification_id: str, message: str, task_id: str | None = None
    ) -> None:
        notification = Notification(
            notification_id=notification_id, message=message, task_id=task_id
        )
        self.db.table("notifications")
        self.db.put("notifications", notification_id, notification.model_dump())

    def assert_notification_status(self, notification_id: str, expected_status: str) -> Any:
        return self._notification(notification_id)["status"] == expected_status

    def _notification(self, notification_id: str) -> Record:
        return self._existing("notifications", notification_id, "Notification {} not found")


MOCK = DomainKind(
    name="mock",
    agent=Side(MockTools, MockDB, keyed=("tasks", "users")),
    user=Side(MockUserTools, MockUserDB, keyed=("notifications",), file="user_db"),
)
