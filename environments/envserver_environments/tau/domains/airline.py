"""tau2-bench's domain `airline`. Names, parameters, checks and their order, outcomes and the words
of errors are those of src/tau2/domains/airline/tools.py, quirks included: a new booking takes
seats, changes and cancellations touch none; `update_*` stores what it is given: 1.0 bags are not 1
to the hash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .database import Record
from .toolkit import DatabaseRow, Toolkit, calculate, calculation, handover, tool
from .world import DomainKind, Side

# Names and order of the fields are upstream's: results and hashes are made of them.

FlightType = Literal["round_trip", "one_way"]
CabinClass = Literal["business", "economy", "basic_economy"]
Insurance = Literal["yes", "no"]


class Name(BaseModel):
    first_name: str
    last_name: str


class Address(BaseModel):
    address1: str
    address2: str | None = None
    city: str
    country: str
    state: str
    zip: str


class Payment(BaseModel):
    """Whole dollars that went one way or, where negative, the other."""

    payment_id: str = Field(description="Id of the payment method")
    amount: int = Field(description="Dollars")


class CreditCard(BaseModel):
    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str


class GiftCard(BaseModel):
    source: Literal["gift_card"]
    id: str
    amount: float


class Certificate(BaseModel):
    source: Literal["certificate"]
    id: str
    amount: float


class Passenger(BaseModel):
    """Somebody who flies."""

    first_name: str = Field(description="First name of the passenger")
    last_name: str = Field(description="Last name of the passenger")
    dob: str = Field(description="Date of birth as YYYY-MM-DD")


class FlightDateStatusAvailable(BaseModel):
    status: Literal["available"]
    available_seats: dict[CabinClass, int]
    prices: dict[CabinClass, int]


class FlightDateStatusLanded(BaseModel):
    status: Literal["landed"]
    actual_departure_time_est: str
    actual_arrival_time_est: str


class FlightDateStatusCancelled(BaseModel):
    status: Literal["cancelled"]


class FlightDateStatusDelayed(BaseModel):
    status: Literal["delayed"]
    estimated_departure_time_est: str
    estimated_arrival_time_est: str


class FlightDataStatusFlying(BaseModel):
    status: Literal["flying"]
    actual_departure_time_est: str
    estimated_arrival_time_est: str


class FlightDataStatusOnTime(BaseModel):
    status: Literal["on time"]
    estimated_departure_time_est: str
    estimated_arrival_time_est: str


class Flight(BaseModel):
    flight_number: str
    origin: str
    destination: str
    scheduled_departure_time_est: str
    scheduled_arrival_time_est: str
    dates: dict[
        str,
        FlightDateStatusAvailable
        | FlightDateStatusLanded
        | FlightDateStatusCancelled
        | FlightDateStatusDelayed
        | FlightDataStatusFlying
        | FlightDataStatusOnTime,
    ]


class ReservationFlight(BaseModel):
    flight_number: str
    origin: str
    destination: str
    date: str
    price: int


class FlightInfo(BaseModel):
    """A flight on a day, as the assistant names it."""

    flight_number: str = Field(description="Number of the flight, such as 'HAT001'.")
    date: str = Field(description="Its date as 'YYYY-MM-DD', such as '2024-05-01'.")


class User(BaseModel):
    user_id: str
    name: Name
    address: Address
    email: str
    dob: str
    payment_methods: dict[str, CreditCard | GiftCard | Certificate]
    saved_passengers: list[Passenger]
    membership: Literal["gold", "silver", "regular"]
    reservations: list[str]


class Reservation(BaseModel):
    reservation_id: str
    user_id: str
    origin: str
    destination: str
    flight_type: FlightType
    cabin: CabinClass
    flights: list[ReservationFlight]
    passengers: list[Passenger]
    payment_history: list[Payment]
    created_at: str
    total_baggages: int
    nonfree_baggages: int
    insurance: Insurance
    status: Literal["cancelled"] | None = None


class FlightDB(BaseModel):
    model_config = ConfigDict(extra="forbid")

    flights: dict[str, Flight]
    users: dict[str, User]
    reservations: dict[str, Reservation]


_NOW = "2024-05-15T15:00:00"
_RESERVATION_IDS = ("HATHAT", "HATHAU", "HATHAV")
_CERTIFICATE_IDS = ("certificate_3221322", "certificate_3221323", "certificate_3221324")

_AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}


class AirlineTools(Toolkit):
    words = {
        "user_id": "Id of the user, such as 'sara_doe_496'.",
        "reservation_id": "Id of the reservation, such as 'ZFA04Y'.",
        "payment_id": "Id of a payment method in the user's profile, such as "
        "'credit_card_7815826', 'gift_card_7815826' or 'certificate_7815826'.",
        "origin": "Airport to start from, in three letters, such as 'JFK'.",
        "destination": "Airport to arrive at, in three letters, such as 'LAX'.",
        "date": "Date of the flight as 'YYYY-MM-DD', such as '2024-05-01'.",
    }

    @tool(
        "write",
        origin="IATA code of the city to start from, such as 'SFO'.",
        destination="IATA code of the city to arrive at, such as 'JFK'.",
        flight_type="'one_way' or 'round_trip'.",
        cabin="'basic_economy', 'economy' or 'business'.",
        flights="Each flight of the journey.",
        passengers="Each passenger.",
        payment_methods="Each payment; together they must be the total price.",
        total_baggages="How many bags in all.",
        nonfree_baggages="How many of them are to be paid for.",
        insurance="Is the reservation insured?",
    )
    def book_reservation(
        self,
        user_id: str,
        origin: str,
        destination: str,
        flight_type: FlightType,
        cabin: CabinClass,
        flights: list[FlightInfo | dict],  # type: ignore[type-arg]
        passengers: list[Passenger | dict],  # type: ignore[type-arg]
        payment_methods: list[Payment | dict],  # type: ignore[type-arg]
        total_baggages: int,
        nonfree_baggages: int,
        insurance: Insurance,
    ) -> DatabaseRow:
        """Books a reservation."""
        legs: Any = _as_models(FlightInfo, flights)
        people: Any = _as_models(Passenger, passengers)
        payments: Any = _as_models(Payment, payment_methods)
        user = self._user(user_id)
        reservation_id = self._free_reservation_id()
        reservation = Reservation(
            reservation_id=reservation_id,
            user_id=user_id,
            origin=origin,
            destination=destination,
            flight_type=flight_type,
            cabin=cabin,
            flights=[],
            passengers=people,
            payment_history=payments,
            created_at=_NOW,
            total_baggages=total_baggages,
            nonfree_baggages=nonfree_baggages,
            insurance=insurance,
        )
        total_price = 0
        for leg in legs:
            part = self._bookable(leg, cabin, len(people))
            reservation.flights.append(part)
            total_price += part.price * len(people)
        if insurance == "yes":
            total_price += 30 * len(people)
        total_price += 50 * nonfree_baggages
        _check_payments(user, payments, total_price)
        self._pay(user_id, payments)
        for leg in legs:
            day = self.db.edit("flights", leg.flight_number)["dates"][leg.date]
            day["available_seats"][cabin] -= len(people)
        record = reservation.model_dump()
        self.db.put("reservations", reservation_id, record)
        self.db.edit("users", user_id)["reservations"].append(reservation_id)
        return DatabaseRow(record)

    @calculation
    def calculate(self, expression: str) -> str:
        return calculate(expression)

    @tool("write")
    def cancel_reservation(self, reservation_id: str) -> DatabaseRow:
        """Cancels a whole reservation."""
        self._reservation(reservation_id)
        reservation = self.db.edit("reservations", reservation_id)
        reservation["payment_history"] += [
            _payment(payment["payment_id"], -payment["amount"])
            for payment in reservation["payment_history"]
        ]
        reservation["status"] = "cancelled"
        return DatabaseRow(reservation)

    @tool("read", reservation_id="Id of the reservation, such as '8JX2WO'.")
    def get_reservation_details(self, reservation_id: str) -> DatabaseRow:
        """Shows a reservation."""
        return DatabaseRow(self._reservation(reservation_id))

    @tool("read")
    def get_user_details(self, user_id: str) -> DatabaseRow:
        """Shows a user with the ids of all reservations."""
        return DatabaseRow(self._user(user_id))

    @tool("read")
    def list_all_airports(self) -> list[DatabaseRow]:
        """Lists all airports."""
        return [DatabaseRow({"iata": iata, "city": city}) for iata, city in _AIRPORTS.items()]

    @tool("read")
    def search_direct_flight(self, origin: str, destination: str, date: str) -> list[DatabaseRow]:
        """Finds direct flights between two cities on a day."""
        return [DatabaseRow(flight) for flight in self._available(date, origin, destination)]

    @tool("read")
    def search_onestop_flight(
        self, origin: str, destination: str, date: str
    ) -> list[list[DatabaseRow]]:
        """Finds connections with one stop between two cities on a day."""
        found = []
        for first in self._available(date, origin):
            first["date"] = date
            arrival = first["scheduled_arrival_time_est"]
            date2 = f"2024-05-{int(date[-2:]) + 1}" if "+1" in arrival else date
            for second in self._available(date2, first["destination"], destination, arrival):
                second["date"] = date2
                found.append([DatabaseRow(first), DatabaseRow(second)])
        return found

    @tool("write", amount="Dollars that it is worth.")
    def send_certificate(self, user_id: str, amount: int) -> str:
        """Sends a certificate to a user; take care."""
        user = self._user(user_id)
        for payment_id in _CERTIFICATE_IDS:
            if payment_id not in user["payment_methods"]:
                certificate = Certificate(id=payment_id, amount=amount, source="certificate")
                methods = self.db.edit("users", user_id)["payment_methods"]
                methods[payment_id] = certificate.model_dump()
                return f"Certificate {payment_id} added to user {user_id} with amount {amount}."
        raise ValueError("Too many certificates")

    @handover
    def transfer_to_human_agents(self, summary: str) -> str:
        return "Transfer successful"

    @tool(
        "write",
        total_baggages="How many bags it has in all, after the change.",
        nonfree_baggages="How many of them are to be paid for, after the change.",
    )
    def update_reservation_baggages(
        self, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
    ) -> DatabaseRow:
        """Changes how many bags a reservation has."""
        reservation = self._reservation(reservation_id)
        price = 50 * max(0, nonfree_baggages - reservation["nonfree_baggages"])
        payment = self._payment_for_update(reservation["user_id"], payment_id, price)
        reservation = self.db.edit("reservations", reservation_id)
        reservation["payment_history"] += payment
        reservation["total_baggages"] = total_baggages
        reservation["nonfree_baggages"] = nonfree_baggages
        return DatabaseRow(reservation)

    @tool(
        "write",
        cabin="Cabin of the reservation after the change.",
        flights="Each flight of the WHOLE journey after the change, also those that stay.",
    )
    def update_reservation_flights(
        self,
        reservation_id: str,
        cabin: CabinClass,
        flights: list[FlightInfo | dict],  # type: ignore[type-arg]
        payment_id: str,
    ) -> DatabaseRow:
        """Changes the flights or the cabin of a reservation."""
        legs: Any = _as_models(FlightInfo, flights)
        reservation = self._reservation(reservation_id)
        self._user(reservation["user_id"])
        passengers = len(reservation["passengers"])
        total_price = 0
        parts = []
        for leg in legs:
            part = _kept(reservation, leg, cabin)
            if part is None:
                part = self._bookable(leg, cabin, passengers).model_dump()
            total_price += part["price"] * passengers
            parts.append(part)
        total_price -= sum(part["price"] for part in reservation["flights"]) * passengers
        payment = self._payment_for_update(reservation["user_id"], payment_id, total_price)
        reservation = self.db.edit("reservations", reservation_id)
        reservation["payment_history"] += payment
        reservation["flights"] = parts
        reservation["cabin"] = cabin
        return DatabaseRow(reservation)

    @tool("write", passengers="Each passenger after the change.")
    def update_reservation_passengers(
        self,
        reservation_id: str,
        passengers: list[Passenger | dict],  # type: ignore[type-arg]
    ) -> DatabaseRow:
        """Changes who the passengers of a reservation are, but not how many."""
        people: Any = _as_models(Passenger, passengers)
        reservation = self._reservation(reservation_id)
        if len(people) != len(reservation["passengers"]):
            raise ValueError("Number of passengers does not match")
        reservation = self.db.edit("reservations", reservation_id)
        reservation["passengers"] = _plain(people)
        return DatabaseRow(reservation)

    @tool("read", flight_number="Number of the flight.", date="Date of the flight.")
    def get_flight_status(self, flight_number: str, date: str) -> str:
        """Tells the status of a flight on a day."""
        return str(self._day(flight_number, date)["status"])

    def _user(self, user_id: str) -> Record:
        return self._existing("users", user_id, "User {} not found")

    def _reservation(self, reservation_id: str) -> Record:
        return self._existing("reservations", reservation_id, "Reservation {} not found")

    def _day(self, flight_number: str, date: str) -> Record:
        flight = self._existing("flights", flight_number, "Flight {} not found")
        days: dict[str, Record] = flight["dates"]
        if date not in days:
            raise ValueError(f"Flight {flight_number} not found on date {date}")
        return days[date]

    def _free_reservation_id(self) -> str:
        for reservation_id in _RESERVATION_IDS:
            if self.db.get("reservations", reservation_id) is None:
                return reservation_id
        raise ValueError("Too many reservations")

    def _bookable(self, leg: Any, cabin: str, passengers: int) -> ReservationFlight:
        flight = self._existing("flights", leg.flight_number, "Flight {} not found")
        day = self._day(leg.flight_number, leg.date)
        if day["status"] != "available":
            raise ValueError(f"Flight {leg.flight_number} not available on date {leg.date}")
        if day["available_seats"][cabin] < passengers:
            raise ValueError(f"Not enough seats on flight {leg.flight_number}")
        return ReservationFlight(
            flight_number=leg.flight_number,
            origin=flight["origin"],
            destination=flight["destination"],
            date=leg.date,
            price=day["prices"][cabin],
        )

    def _available(
        self,
        date: str,
        origin: str | None = None,
        destination: str | None = None,
        leave_after: str | None = None,
    ) -> Iterator[Record]:
        for flight in self.db.rows("flights"):
            if (
                (origin is None or flight["origin"] == origin)
                and (destination is None or flight["destination"] == destination)
                and date in flight["dates"]
                and flight["dates"][date]["status"] == "available"
                and (leave_after is None or flight["scheduled_departure_time_est"] >= leave_after)
            ):
                yield {
                    "flight_number": flight["flight_number"],
                    "origin": flight["origin"],
                    "destination": flight["destination"],
                    "status": "available",
                    "scheduled_departure_time_est": flight["scheduled_departure_time_est"],
                    "scheduled_arrival_time_est": flight["scheduled_arrival_time_est"],
                    "date": None,
                    "available_seats": flight["dates"][date]["available_seats"],
                    "prices": flight["dates"][date]["prices"],
                }

    def _pay(self, user_id: str, payments: Sequence[Payment]) -> None:
        for payment in payments:
            methods = self.db.edit("users", user_id)["payment_methods"]
            match methods[payment.payment_id]["source"]:
                case "gift_card":
                    methods[payment.payment_id]["amount"] -= payment.amount
                case "certificate":
                    del methods[payment.payment_id]

    def _payment_for_update(self, user_id: str, payment_id: str, price: int) -> list[Record]:
        """Pays (or gets back) a difference; the payment, if there is one."""
        methods = self._user(user_id)["payment_methods"]
        if payment_id not in methods:
            raise ValueError("Payment method not found")
        match methods[payment_id]:
            case {"source": "certificate"}:
                raise ValueError("Certificate cannot be used to update reservation")
            case {"source": "gift_card", "amount": amount}:
                if amount < price:
                    raise ValueError("Gift card balance is not enough")
                card = self.db.edit("users", user_id)["payment_methods"][payment_id]
                card["amount"] -= price
        return [_payment(payment_id, price)] if price != 0 else []


def _as_models(model: type[BaseModel], values: Any) -> Any:
    """Parses each of `values` as `model` if all are objects; else returns them unchanged."""
    if all(isinstance(value, dict) for value in values):
        return [model(**value) for value in values]
    return values


def _plain(values: Any) -> Any:
    if not isinstance(values, list):
        return values
    return [value.model_dump() if isinstance(value, BaseModel) else value for value in values]


def _check_payments(user: Record, payments: Sequence[Payment], total_price: int) -> None:
    methods = user["payment_methods"]
    for payment in payments:
        if payment.payment_id not in methods:
            raise ValueError(f"Payment method {payment.payment_id} not found")
        method = methods[payment.payment_id]
        if method["source"] in {"gift_card", "certificate"} and method["amount"] < payment.amount:
            raise ValueError(f"Not enough balance in payment method {payment.payment_id}")
    paid = sum(payment.amount for payment in payments)
    if paid != total_price:
        raise ValueError(
            f"Payment amount does not add up, total price is {total_price}, but paid {paid}"
        )


def _kept(reservation: Record, leg: Any, cabin: str) -> Record | None:
    """The part of the reservation that is the flight `leg`, if the cabin stays."""
    for part in reservation["flights"] if cabin == reservation["cabin"] else ():
        if part["flight_number"] == leg.flight_number and part["date"] == leg.date:
            return dict(part)
    return None


def _payment(payment_id: str, amount: int) -> Record:
    return Payment(payment_id=payment_id, amount=amount).model_dump()


AIRLINE = DomainKind(
    name="airline",
    agent=Side(AirlineTools, FlightDB, keyed=("flights", "users", "reservations")),
)
